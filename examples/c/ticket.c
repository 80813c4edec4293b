/* Tickets as JSON: a flat map of strings and integers, of which every field is passed on. */
#include "engine.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FIELDS = 64, MAX_TEXT = 4096 };

static void print_text(const char *text, size_t size) {
    putchar('"');
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\')
            putchar('\\');
        if (c < 0x20)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

void ticket_print(const msgpack_object *ticket) {
    putchar('{');
    for (uint32_t i = 0; i < ticket->via.map.size; i++) {
        const msgpack_object_kv *field = &ticket->via.map.ptr[i];
        if (i)
            putchar(',');
        print_text(field->key.via.str.ptr, field->key.via.str.size);
        putchar(':');
        if (field->val.type == MSGPACK_OBJECT_STR)
            print_text(field->val.via.str.ptr, field->val.via.str.size);
        else
            printf("%" PRId64, field->val.via.i64);
    }
    puts("}");
}

static const char *skip(const char *at, char wanted) {
    while (at && isspace((unsigned char)*at))
        at++;
    if (!at || *at != wanted)
        return NULL;
    for (at++; isspace((unsigned char)*at); at++)
        ;
    return at;
}

static char *put_utf8(char *to, unsigned long code) {
    if (code < 0x80) {
        *to++ = (char)code;
        return to;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    *to++ = (char)((0xff00 >> (more + 1) & 0xff) | code >> 6 * more);
    while (more--)
        *to++ = (char)(0x80 | (code >> 6 * more & 0x3f));
    return to;
}

static unsigned long hex4(const char *at) {
    char digits[5] = "";
    strncpy(digits, at, 4);
    return strtoul(digits, NULL, 16);
}

/* Read a string at its first quote; returns what follows it, NULL when it is none. */
static const char *read_text(const char *at, char *to) {
    static const char *const names = "\"\\/bfnrt", *const values = "\"\\/\b\f\n\r\t";
    char *end = to + MAX_TEXT - 4;
    if (!at || *at++ != '"')
        return NULL;
    while (*at && *at != '"' && to < end) {
        if (*at != '\\') {
            *to++ = *at++;
        } else if (at[1] == 'u' && strlen(at) > 6) {
            unsigned long code = hex4(at + 2);
            at += 6;
            if (code >= 0xd800 && code < 0xdc00 && !strncmp(at, "\\u", 2) && strlen(at) > 6) {
                code = 0x10000 + ((code - 0xd800) << 10) + (hex4(at + 2) - 0xdc00);
                at += 6;
            }
            to = put_utf8(to, code);
        } else {
            const char *name = at[1] ? strchr(names, at[1]) : NULL;
            if (!name)
                return NULL;
            *to++ = values[name - names];
            at += 2;
        }
    }
    *to = 0;
    return skip(at, '"');
}

bool ticket_pack(msgpack_packer *pk, const char *json) {
    static char keys[MAX_FIELDS][MAX_TEXT], texts[MAX_FIELDS][MAX_TEXT];
    bool is_number[MAX_FIELDS];
    unsigned count = 0;
    const char *at = skip(json, '{');
    while (at && *at != '}') {
        if (count == MAX_FIELDS || (count && !(at = skip(at, ','))))
            return false;
        at = skip(read_text(at, keys[count]), ':');
        if (!at)
            return false;
        is_number[count] = *at != '"';
        if (is_number[count]) {
            size_t size = strspn(at, "-0123456789");
            if (!size || size > 20)
                return false;
            memcpy(texts[count], at, size);
            texts[count][size] = 0;
            for (at += size; isspace((unsigned char)*at); at++)
                ;
        } else {
            at = read_text(at, texts[count]);
        }
        count++;
    }
    if (!at)
        return false;
    msgpack_pack_map(pk, count);
    for (unsigned i = 0; i < count; i++) {
        kvbus_pack_text(pk, keys[i]);
        if (is_number[i])
            msgpack_pack_int64(pk, strtoll(texts[i], NULL, 10));
        else
            kvbus_pack_text(pk, texts[i]);
    }
    return true;
}
