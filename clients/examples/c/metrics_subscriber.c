/* Prints what a daemon publishes: metrics_subscriber [TOPIC ...]. See docs/metrics.md. */
#include "deepinfer.h"
#include "mp.h"

int main(int count, char **topics)
{
    connection found = read_connection();
    const connection *keys = strncmp(found.metrics_endpoint, "ipc:", 4) == 0 ? NULL : &found;
    void *socket = new_socket(zmq_ctx_new(), ZMQ_SUB, keys);
    char *all[] = {"metrics", "events", "requests"};
    for (int i = 0; i < (count > 1 ? count - 1 : 3); i++)
        set_text(socket, ZMQ_SUBSCRIBE, count > 1 ? topics[i + 1] : all[i]);
    if (zmq_connect(socket, found.metrics_endpoint) != 0)
        die("%s: %s", found.metrics_endpoint, zmq_strerror(zmq_errno()));
    zmq_msg_t topic, message;
    zmq_msg_init(&topic);
    zmq_msg_init(&message);
    while (zmq_msg_recv(&topic, socket, 0) >= 0 && zmq_msg_recv(&message, socket, 0) >= 0) {
        printf("%.*s ", (int)zmq_msg_size(&topic), (const char *)zmq_msg_data(&topic));
        mp_print_line(stdout, mp_read(zmq_msg_data(&message), zmq_msg_size(&message)));
    }
}
