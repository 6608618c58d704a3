/* Finds the daemon and opens sockets to it. The rules are in docs/protocol.md, "Finding the daemon". Include it first. */
#ifndef DEEPINFER_H
#define DEEPINFER_H

#define _POSIX_C_SOURCE 200809L
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#define PATIENCE_MS 3000

typedef struct {
    char endpoint[256], metrics_endpoint[256];
    char server_key[64], public_key[64], secret_key[64]; /* empty when nothing is encrypted */
} connection;

_Noreturn static inline void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

/* The string after "key": in JSON, empty when there is none. Enough for this file; a JSON library does more. */
static inline void json_text(const char *json, const char *key, char *out, size_t size)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    out[0] = 0;
    for (const char *at = json; (at = strstr(at, quoted)) != NULL;) {
        at += strlen(quoted);
        while (isspace((unsigned char)*at) || *at == ':')
            at++;
        if (*at != '"')
            continue;
        size_t length = strcspn(++at, "\"\\");
        if (at[length] != '"' || length >= size)
            die("%s of the connection file is too long, or has escapes, which this example does not read", key);
        memcpy(out, at, length);
        out[length] = 0;
        return;
    }
}

static inline void connection_path(char *path, size_t size)
{
    const char *folder;
    int length;
    if ((folder = getenv("DEEPINFER_RUNTIME_DIR")) != NULL && *folder)
        length = snprintf(path, size, "%s/daemon.json", folder);
    else if ((folder = getenv("RUNTIME_DIRECTORY")) != NULL && *folder)
        length = snprintf(path, size, "%.*s/daemon.json", (int)strcspn(folder, ":"), folder);
    else if ((folder = getenv("XDG_RUNTIME_DIR")) != NULL && *folder)
        length = snprintf(path, size, "%s/deepinfer-daemon/daemon.json", folder);
    else {
        folder = getenv("TMPDIR");
        length = snprintf(path, size, "%s/deepinfer-daemon-%u/daemon.json", folder && *folder ? folder : "/tmp",
                          (unsigned)getuid());
    }
    if (length < 0 || (size_t)length >= size)
        die("the path of the runtime folder is too long");
}

static inline connection read_connection(void)
{
    char path[4096], json[16384];
    struct stat owner;
    connection to = {0};
    connection_path(path, sizeof path);
    FILE *file = fopen(path, "rb");
    if (file == NULL || fstat(fileno(file), &owner) != 0)
        die("no daemon is running: there is no connection file %s", path);
    /* Whoever else can write it could read our prompts. */
    if (owner.st_uid != getuid() && owner.st_uid != 0)
        die("%s belongs to another user", path);
    size_t length = fread(json, 1, sizeof json - 1, file);
    json[length] = 0;
    if (length == sizeof json - 1)
        die("%s is too long", path);
    fclose(file);
    json_text(json, "endpoint", to.endpoint, sizeof to.endpoint);
    json_text(json, "metrics_endpoint", to.metrics_endpoint, sizeof to.metrics_endpoint);
    json_text(json, "server_key", to.server_key, sizeof to.server_key);
    json_text(json, "public_key", to.public_key, sizeof to.public_key);
    json_text(json, "secret_key", to.secret_key, sizeof to.secret_key);
    return to;
}

static inline void set_number(void *socket, int option, int number)
{
    if (zmq_setsockopt(socket, option, &number, sizeof number) != 0)
        die("socket option %d: %s", option, zmq_strerror(zmq_errno()));
}

static inline void set_text(void *socket, int option, const char *text)
{
    if (zmq_setsockopt(socket, option, text, strlen(text)) != 0)
        die("socket option %d: %s", option, zmq_strerror(zmq_errno()));
}

/* Not yet connected. `keys` is NULL for the sockets in the daemon's own folder that have none. */
static inline void *new_socket(void *context, int type, const connection *keys)
{
    void *socket = zmq_socket(context, type);
    if (socket == NULL)
        die("no socket: %s", zmq_strerror(zmq_errno()));
    set_number(socket, ZMQ_LINGER, 0);
    set_number(socket, ZMQ_HEARTBEAT_IVL, 2000);
    set_number(socket, ZMQ_HEARTBEAT_TIMEOUT, 6000);
    set_number(socket, ZMQ_HEARTBEAT_TTL, 6000);
    if (keys != NULL && keys->server_key[0]) {
        set_text(socket, ZMQ_CURVE_SERVERKEY, keys->server_key); /* the daemon's public key */
        set_text(socket, ZMQ_CURVE_PUBLICKEY, keys->public_key); /* our own pair */
        set_text(socket, ZMQ_CURVE_SECRETKEY, keys->secret_key);
    }
    return socket;
}

#endif
