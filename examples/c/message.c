/* Maps of msgpack: reading their fields, and writing text. */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const msgpack_object *kvbus_get(const msgpack_object *map, const char *key) {
    if (map && map->type == MSGPACK_OBJECT_MAP)
        for (uint32_t i = 0; i < map->via.map.size; i++)
            if (kvbus_is_text(&map->via.map.ptr[i].key, key))
                return &map->via.map.ptr[i].val;
    return NULL;
}

bool kvbus_is_text(const msgpack_object *value, const char *text) {
    return value && value->type == MSGPACK_OBJECT_STR && value->via.str.size == strlen(text) &&
           !memcmp(value->via.str.ptr, text, strlen(text));
}

void kvbus_copy_text(const msgpack_object *value, char *to, size_t size) {
    bool is_text = value && value->type == MSGPACK_OBJECT_STR;
    snprintf(to, size, "%.*s", is_text ? (int)value->via.str.size : 0, is_text ? value->via.str.ptr : "");
}

static int write_or_abort(void *message, const char *bytes, size_t size) {
    if (msgpack_sbuffer_write(message, bytes, size))
        abort(); /* no memory */
    return 0;
}

void kvbus_begin(msgpack_sbuffer *message, msgpack_packer *pk) {
    msgpack_sbuffer_init(message);
    msgpack_packer_init(pk, message, write_or_abort);
}

void kvbus_pack_text(msgpack_packer *pk, const char *text) {
    msgpack_pack_str_with_body(pk, text, strlen(text));
}

/* A number may travel as a float or as an integer. */
double kvbus_number(const msgpack_object *value, double otherwise) {
    if (value && (value->type == MSGPACK_OBJECT_FLOAT64 || value->type == MSGPACK_OBJECT_FLOAT32))
        return value->via.f64;
    return value && value->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? (double)value->via.u64 : otherwise;
}
