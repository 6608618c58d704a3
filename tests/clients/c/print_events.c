/* Prints as JSON, line by line, what the msgpack reader of the C example makes of messages in hexadecimal. */
#include <stdlib.h>
#include "mp.h"

int main(void)
{
    static char line[1 << 16];
    while (fgets(line, sizeof line, stdin) != NULL) {
        size_t length = strcspn(line, "\n") / 2;
        /* Exactly as long as the message, so that the sanitizer sees a read beyond it. */
        unsigned char *bytes = malloc(length ? length : 1);
        for (size_t i = 0; i < length; i++) {
            char digits[] = {line[2 * i], line[2 * i + 1], 0};
            bytes[i] = (unsigned char)strtoul(digits, NULL, 16);
        }
        mp_value value = mp_read(bytes, length);
        if (value.type == MP_NONE)
            fputs("malformed", stdout);
        else
            mp_print(stdout, value);
        putchar('\n');
        free(bytes);
    }
}
