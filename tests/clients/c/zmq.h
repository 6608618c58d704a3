/* Stands in for libzmq's own header where only its shared library is installed: what the examples use of it, no more. */
#ifndef ZMQ_STAND_IN_H
#define ZMQ_STAND_IN_H

#include <stddef.h>

#define ZMQ_PAIR 0
#define ZMQ_SUB 2
#define ZMQ_DEALER 5
#define ZMQ_SUBSCRIBE 6
#define ZMQ_LINGER 17
#define ZMQ_RCVTIMEO 27
#define ZMQ_SNDTIMEO 28
#define ZMQ_IMMEDIATE 39
#define ZMQ_CURVE_PUBLICKEY 48
#define ZMQ_CURVE_SECRETKEY 49
#define ZMQ_CURVE_SERVERKEY 50
#define ZMQ_HEARTBEAT_IVL 75
#define ZMQ_HEARTBEAT_TTL 76
#define ZMQ_HEARTBEAT_TIMEOUT 77
#define ZMQ_POLLIN 1
#define ZMQ_EVENT_DISCONNECTED 0x0200
#define ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL 0x0800
#define ZMQ_EVENT_HANDSHAKE_SUCCEEDED 0x1000
#define ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL 0x2000
#define ZMQ_EVENT_HANDSHAKE_FAILED_AUTH 0x4000

typedef union {
    unsigned char bytes[64];
    void *aligned;
} zmq_msg_t;

typedef struct {
    void *socket;
    int fd;
    short events, revents;
} zmq_pollitem_t;

int zmq_errno(void);
const char *zmq_strerror(int number);
void *zmq_ctx_new(void);
void *zmq_socket(void *context, int type);
int zmq_setsockopt(void *socket, int option, const void *value, size_t size);
int zmq_connect(void *socket, const char *endpoint);
int zmq_socket_monitor(void *socket, const char *endpoint, int events);
int zmq_poll(zmq_pollitem_t *items, int count, long timeout_ms);
int zmq_send(void *socket, const void *bytes, size_t size, int flags);
int zmq_recv(void *socket, void *bytes, size_t size, int flags);
int zmq_msg_init(zmq_msg_t *message);
int zmq_msg_recv(zmq_msg_t *message, void *socket, int flags);
void *zmq_msg_data(zmq_msg_t *message);
size_t zmq_msg_size(const zmq_msg_t *message);

#endif
