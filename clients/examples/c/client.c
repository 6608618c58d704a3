/* client generate PROMPT [MAX_NEW_TOKENS] | client status | client bytes PROMPT [MAX_NEW_TOKENS] */
#include "deepinfer.h"
#include <errno.h>
#include <signal.h>
#include "mp.h"

#define ID "a" /* of the one request that this program has open */
#define WATCHED (ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | \
    ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_DISCONNECTED)

typedef struct {
    void *socket, *monitor;
    zmq_msg_t frame; /* the last event */
} daemon_link;

static unsigned char request[1 << 20];
static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal)
{
    (void)signal;
    interrupted = 1;
}

/* The next WATCHED event, or 0 after PATIENCE_MS. */
static unsigned monitor_event(void *monitor)
{
    unsigned char event[6];
    char address[512];
    uint16_t number;
    if (zmq_recv(monitor, event, sizeof event, 0) != sizeof event || zmq_recv(monitor, address, sizeof address, 0) < 0)
        return 0;
    memcpy(&number, event, sizeof number);
    return number;
}

static void connect_daemon(daemon_link *to)
{
    connection found = read_connection();
    void *context = zmq_ctx_new();
    to->socket = new_socket(context, ZMQ_DEALER, &found);
    zmq_msg_init(&to->frame);
    /* Else a request that is made while no daemon runs would be executed when one starts. */
    set_number(to->socket, ZMQ_IMMEDIATE, 1);
    set_number(to->socket, ZMQ_SNDTIMEO, PATIENCE_MS);
    /* The monitor tells when the daemon lets us in, and when the connection is lost. */
    to->monitor = zmq_socket(context, ZMQ_PAIR);
    set_number(to->monitor, ZMQ_RCVTIMEO, PATIENCE_MS);
    if (zmq_socket_monitor(to->socket, "inproc://monitor", WATCHED) != 0 ||
        zmq_connect(to->monitor, "inproc://monitor") != 0 || zmq_connect(to->socket, found.endpoint) != 0)
        die("%s: %s", found.endpoint, zmq_strerror(zmq_errno()));
    unsigned event = monitor_event(to->monitor);
    if (event == 0)
        die("nothing answers at %s", found.endpoint);
    if (event != ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
        die("%s does not let this client in: are these the right keys?", found.endpoint);
}

static mp_writer new_request(unsigned pairs, const char *op)
{
    mp_writer to = {request, sizeof request, 0, 0};
    mp_write_map(&to, pairs);
    mp_write_str(&to, "v");
    mp_write_int(&to, 1);
    mp_write_str(&to, "op");
    mp_write_str(&to, op);
    mp_write_str(&to, "id");
    mp_write_str(&to, ID);
    return to;
}

static mp_writer generate_request(const char *prompt, const char *max_new_tokens)
{
    mp_writer to = new_request(max_new_tokens ? 5 : 4, "generate");
    mp_write_str(&to, "prompt");
    mp_write_str(&to, prompt);
    if (max_new_tokens) {
        mp_write_str(&to, "max_new_tokens");
        mp_write_int(&to, strtoll(max_new_tokens, NULL, 10));
    }
    if (to.full)
        die("the prompt is too long");
    return to;
}

static void send_request(daemon_link *to, mp_writer written)
{
    while (zmq_send(to->socket, written.bytes, written.length, 0) < 0)
        if (zmq_errno() != EINTR)
            die("the request was not sent: %s", zmq_strerror(zmq_errno()));
}

/* The next event, valid until the following call. MP_NONE after a while without one, or after a signal. */
static mp_value next_event(daemon_link *from)
{
    zmq_pollitem_t ready[] = {{from->socket, 0, ZMQ_POLLIN, 0}, {from->monitor, 0, ZMQ_POLLIN, 0}};
    if (zmq_poll(ready, 2, 100) <= 0)
        return (mp_value){0};
    if (!(ready[0].revents & ZMQ_POLLIN))
        die("the daemon is gone"); /* and with the connection everything that was open on it */
    if (zmq_msg_recv(&from->frame, from->socket, 0) < 0)
        return (mp_value){0};
    mp_value event = mp_read(zmq_msg_data(&from->frame), zmq_msg_size(&from->frame));
    if (event.type != MP_MAP)
        die("this is no event");
    return event;
}

static int print_error(mp_value event)
{
    mp_value code = mp_get(event, "code"), message = mp_get(event, "message");
    fprintf(stderr, "error %.*s: %.*s\n", (int)code.count, (const char *)code.start, (int)message.count,
            (const char *)message.start);
    return 1;
}

static int generate(const char *prompt, const char *max_new_tokens)
{
    daemon_link daemon;
    int cancelled = 0;
    connect_daemon(&daemon);
    /* The first Ctrl-C cancels, and the stream ends with its own `done`; a second one ends the process. */
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt, .sa_flags = SA_RESETHAND}, NULL);
    send_request(&daemon, generate_request(prompt, max_new_tokens));
    for (int64_t seq = 0;;) {
        mp_value event = next_event(&daemon), name = mp_get(event, "event"), text = mp_get(event, "text");
        if (interrupted && !cancelled) {
            send_request(&daemon, new_request(3, "cancel"));
            cancelled = 1;
        }
        if (event.type == MP_NONE || mp_is(name, "reply"))
            continue;
        if (mp_is(name, "error"))
            return print_error(event);
        if (mp_get(event, "seq").integer != seq++)
            die("events of this stream are missing");
        if (mp_is(name, "token") && text.type == MP_STR) {
            fwrite(text.start, 1, text.count, stdout);
            fflush(stdout);
        }
        if (mp_is(name, "done")) {
            mp_value reason = mp_get(event, "finish_reason"), usage = mp_get(event, "usage");
            if (mp_get(event, "events").integer != seq)
                die("events of this stream are missing");
            fprintf(stderr, "\n%.*s: %" PRId64 " prompt tokens, %" PRId64 " new tokens\n", (int)reason.count,
                    (const char *)reason.start, mp_get(usage, "prompt_tokens").integer,
                    mp_get(usage, "completion_tokens").integer);
            return 0;
        }
    }
}

static int status(void)
{
    daemon_link daemon;
    mp_value event;
    connect_daemon(&daemon);
    send_request(&daemon, new_request(3, "status"));
    do
        event = next_event(&daemon);
    while (event.type == MP_NONE);
    if (mp_is(mp_get(event, "event"), "error"))
        return print_error(event);
    mp_print_line(stdout, mp_get(event, "data"));
    return 0;
}

int main(int count, char **words)
{
    const char *command = count > 1 ? words[1] : "", *max_new_tokens = count > 3 ? words[3] : NULL;
    if (strcmp(command, "status") == 0)
        return status();
    if (strcmp(command, "generate") == 0 && count > 2)
        return generate(words[2], max_new_tokens);
    if (strcmp(command, "bytes") == 0 && count > 2) {
        mp_writer written = generate_request(words[2], max_new_tokens);
        for (size_t i = 0; i < written.length; i++)
            printf("%02x", written.bytes[i]);
        putchar('\n');
        return 0;
    }
    die("usage: client generate PROMPT [MAX_NEW_TOKENS] | client status | client bytes PROMPT [MAX_NEW_TOKENS]");
}
