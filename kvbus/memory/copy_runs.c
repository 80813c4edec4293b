/* Copies a lattice of runs between mapped memories, past the caches where the CPU can. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 64
#define PREFETCHED 1024 /* of the next run: where it starts, no CPU can foresee */

struct run {
    char *to;
    const char *from;
    size_t bytes;
};

#if defined(__SSE2__)
/* Stores past the caches do not first read what they overwrite: a third less of the memory's time.
   They pay from a few lines on; every CPU of x86-64 has them. */
#define STREAMED (2 * LINE)

static void copy_line(char *to, const char *from) {
    const __m128i *source = (const __m128i *)from;
    __m128i *target = (__m128i *)to;
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}

static void copy_run(struct run run, const char *next) {
    if (run.bytes < STREAMED) {
        memcpy(run.to, run.from, run.bytes);
        return;
    }
    size_t at = -(uintptr_t)run.to % LINE;
    memcpy(run.to, run.from, at);
    for (size_t ahead = 0; at + LINE <= run.bytes; at += LINE, ahead += LINE) {
        if (ahead < PREFETCHED)
            __builtin_prefetch(next + ahead);
        copy_line(run.to + at, run.from + at);
    }
    memcpy(run.to + at, run.from + at, run.bytes - at);
}

static void finish(void) { _mm_sfence(); } /* before anybody is told that the bytes are there */
#else
static void copy_run(struct run run, const char *next) {
    for (size_t ahead = 0; ahead < PREFETCHED && ahead < run.bytes; ahead += LINE)
        __builtin_prefetch(next + ahead);
    memcpy(run.to, run.from, run.bytes);
}

static void finish(void) {}
#endif

/* Each array is of offsets from sources, then as many from targets: a run is at each sum of one of
   each. A run that continues the one before on both sides is copied together with it.

   One run in a unit: outer offsets step slowest, so that units which are neighbours become one.
   Several: units do, so that what outer offsets take of one unit (the heads of each reader, say)
   is read while a cache still has what was read beside it. */
void kvbus_copy_runs(const int64_t *outer, int64_t num_outer, const int64_t *units,
                     int64_t num_units, const int64_t *inner, int64_t num_inner,
                     int64_t run_bytes) {
    const int units_slowest = num_inner > 1;
    const int64_t num_corners = num_outer * num_units;
    const int64_t num_fast = units_slowest ? num_outer : num_units;
    struct run run = {0, 0, 0};
    for (int64_t corner = 0; corner < num_corners; corner++) {
        int64_t slow = corner / num_fast, fast = corner % num_fast;
        int64_t o = units_slowest ? fast : slow, u = units_slowest ? slow : fast;
        int64_t from_corner = outer[o] + units[u];
        int64_t to_corner = outer[num_outer + o] + units[num_units + u];
        for (int64_t i = 0; i < num_inner; i++) {
            const char *from = (const char *)(from_corner + inner[i]);
            char *to = (char *)(to_corner + inner[num_inner + i]);
            if (from == run.from + run.bytes && to == run.to + run.bytes) {
                run.bytes += run_bytes;
                continue;
            }
            if (run.bytes > 0)
                copy_run(run, from);
            run = (struct run){to, from, (size_t)run_bytes};
        }
    }
    if (run.bytes > 0)
        copy_run(run, run.from);
    finish();
}
