/* The part of msgpack that the protocol uses. Reading never leaves the bytes that it is given. */
#ifndef MP_H
#define MP_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Writing. What does not fit any more sets `full` and is left out. */

typedef struct {
    unsigned char *bytes;
    size_t size, length;
    int full;
} mp_writer;

static inline void mp_put(mp_writer *to, const void *bytes, size_t length)
{
    if (to->full || length > to->size - to->length) {
        to->full = 1;
        return;
    }
    memcpy(to->bytes + to->length, bytes, length);
    to->length += length;
}

/* A tag and, most significant first, the last `width` bytes of `number`. */
static inline void mp_put_head(mp_writer *to, unsigned tag, uint64_t number, int width)
{
    unsigned char head[9] = {(unsigned char)tag};
    for (int i = 0; i < width; i++)
        head[1 + i] = (unsigned char)(number >> 8 * (width - 1 - i));
    mp_put(to, head, 1 + (size_t)width);
}

static inline void mp_write_map(mp_writer *to, unsigned pairs) /* at most 15; keys and values come next */
{
    mp_put_head(to, 0x80 | pairs, 0, 0);
}

static inline void mp_write_str(mp_writer *to, const char *text) /* UTF-8; the length counts bytes, not characters */
{
    size_t length = strlen(text);
    if (length < 32)
        mp_put_head(to, 0xa0 | (unsigned)length, 0, 0);
    else if (length <= UINT8_MAX)
        mp_put_head(to, 0xd9, length, 1);
    else if (length <= UINT16_MAX)
        mp_put_head(to, 0xda, length, 2);
    else
        mp_put_head(to, 0xdb, length, 4);
    mp_put(to, text, length);
}

static inline void mp_write_int(mp_writer *to, int64_t number)
{
    if (number >= 0 && number < 128)
        mp_put_head(to, (unsigned)number, 0, 0);
    else if (number >= 0 && number <= UINT8_MAX)
        mp_put_head(to, 0xcc, (uint64_t)number, 1);
    else if (number >= 0 && number <= UINT16_MAX)
        mp_put_head(to, 0xcd, (uint64_t)number, 2);
    else if (number >= 0 && number <= UINT32_MAX)
        mp_put_head(to, 0xce, (uint64_t)number, 4);
    else
        mp_put_head(to, number < 0 ? 0xd3 : 0xcf, (uint64_t)number, 8);
}

/* Reading. A value points into the bytes that it was read from. */

enum mp_type { MP_NONE, MP_NIL, MP_BOOL, MP_INT, MP_FLOAT, MP_STR, MP_LIST, MP_MAP };

typedef struct {
    enum mp_type type;          /* MP_NONE: absent, or no msgpack of this kind */
    int64_t integer;            /* of MP_INT and MP_BOOL */
    double number;              /* of MP_FLOAT */
    size_t count;               /* bytes of MP_STR, items of MP_LIST, pairs of MP_MAP */
    const unsigned char *start; /* of a string or of the first item */
    const unsigned char *end;   /* where the items end */
} mp_value;

#define MP_MAX_DEPTH 16

/* How many bytes of a number or a length follow a tag. */
static inline int mp_width(unsigned tag)
{
    switch (tag) {
    case 0xcc: case 0xd0: case 0xd9: return 1;
    case 0xcd: case 0xd1: case 0xda: case 0xdc: case 0xde: return 2;
    case 0xca: case 0xce: case 0xd2: case 0xdb: case 0xdd: case 0xdf: return 4;
    case 0xcb: case 0xcf: case 0xd3: return 8;
    default: return 0;
    }
}

static inline double mp_float(uint64_t bits, int width)
{
    uint32_t half = (uint32_t)bits;
    float single = 0;
    double number = 0;
    memcpy(&single, &half, sizeof single);
    memcpy(&number, &bits, sizeof number);
    return width == 4 ? single : number;
}

/* The value at *at; moves *at behind it. */
static inline mp_value mp_read_deep(const unsigned char **at, const unsigned char *end, int depth)
{
    const mp_value none = {0};
    mp_value value = {0};
    if (*at >= end || depth == 0)
        return none;
    unsigned tag = *(*at)++;
    int width = mp_width(tag);
    uint64_t number = 0;
    if (end - *at < width)
        return none;
    for (int i = 0; i < width; i++)
        number = number << 8 | *(*at)++;
    value.start = *at;
    value.count = (size_t)number;

    switch (tag) {
    case 0xc0: value.type = MP_NIL; break;
    case 0xc2: case 0xc3: value.type = MP_BOOL; value.integer = tag & 1; break;
    case 0xca: case 0xcb: value.type = MP_FLOAT; value.number = mp_float(number, width); break;
    case 0xcc: case 0xcd: case 0xce: case 0xcf: value.type = MP_INT; value.integer = (int64_t)number; break;
    case 0xd0: value.type = MP_INT; value.integer = (int8_t)number; break;
    case 0xd1: value.type = MP_INT; value.integer = (int16_t)number; break;
    case 0xd2: value.type = MP_INT; value.integer = (int32_t)number; break;
    case 0xd3: value.type = MP_INT; value.integer = (int64_t)number; break;
    case 0xd9: case 0xda: case 0xdb: value.type = MP_STR; break;
    case 0xdc: case 0xdd: value.type = MP_LIST; break;
    case 0xde: case 0xdf: value.type = MP_MAP; break;
    default:
        if (tag < 0x80 || tag >= 0xe0) {
            value.type = MP_INT;
            value.integer = (int8_t)tag;
        } else if (tag < 0xc0) {
            value.type = tag < 0x90 ? MP_MAP : tag < 0xa0 ? MP_LIST : MP_STR;
            value.count = tag & (value.type == MP_STR ? 31 : 15);
        }
    }
    if (value.type == MP_STR) {
        if ((size_t)(end - *at) < value.count)
            return none;
        *at += value.count;
    } else if (value.type == MP_LIST || value.type == MP_MAP) {
        for (size_t i = 0; i < value.count; i++)
            for (int part = value.type == MP_MAP ? 2 : 1; part > 0; part--)
                if (mp_read_deep(at, end, depth - 1).type == MP_NONE)
                    return none;
    }
    value.end = *at;
    return value;
}

/* The one value that these bytes are. */
static inline mp_value mp_read(const void *bytes, size_t length)
{
    const mp_value none = {0};
    const unsigned char *at = bytes, *end = at + length;
    mp_value value = mp_read_deep(&at, end, MP_MAX_DEPTH);
    return at == end ? value : none;
}

static inline int mp_is(mp_value value, const char *text)
{
    return value.type == MP_STR && value.count == strlen(text) && memcmp(value.start, text, value.count) == 0;
}

/* The value of `key`; MP_NONE when it is absent. */
static inline mp_value mp_get(mp_value map, const char *key)
{
    const unsigned char *at = map.start;
    for (size_t i = 0; map.type == MP_MAP && i < map.count; i++) {
        mp_value name = mp_read_deep(&at, map.end, MP_MAX_DEPTH);
        mp_value value = mp_read_deep(&at, map.end, MP_MAX_DEPTH);
        if (mp_is(name, key))
            return value;
    }
    return (mp_value){0};
}

static inline void mp_print_text(FILE *to, mp_value value)
{
    fputc('"', to);
    for (size_t i = 0; i < value.count; i++) {
        unsigned char byte = value.start[i];
        if (byte < 0x20 || byte == '"' || byte == '\\')
            fprintf(to, "\\u%04x", byte);
        else
            fputc(byte, to);
    }
    fputc('"', to);
}

/* As JSON. */
static inline void mp_print(FILE *to, mp_value value)
{
    const unsigned char *at = value.start;
    switch (value.type) {
    case MP_BOOL: fputs(value.integer ? "true" : "false", to); break;
    case MP_INT: fprintf(to, "%" PRId64, value.integer); break;
    case MP_FLOAT: fprintf(to, "%.17g", value.number); break;
    case MP_STR: mp_print_text(to, value); break;
    case MP_LIST:
    case MP_MAP:
        fputc(value.type == MP_MAP ? '{' : '[', to);
        for (size_t i = 0; i < value.count; i++) {
            if (i > 0)
                fputc(',', to);
            if (value.type == MP_MAP) {
                mp_print(to, mp_read_deep(&at, value.end, MP_MAX_DEPTH));
                fputc(':', to);
            }
            mp_print(to, mp_read_deep(&at, value.end, MP_MAX_DEPTH));
        }
        fputc(value.type == MP_MAP ? '}' : ']', to);
        break;
    default: fputs("null", to);
    }
}

/* A whole line at once, for whoever reads it through a pipe. */
static inline void mp_print_line(FILE *to, mp_value value)
{
    mp_print(to, value);
    fputc('\n', to);
    fflush(to);
}

#endif
