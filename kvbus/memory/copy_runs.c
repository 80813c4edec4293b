/* Copies of a lattice of runs between mapped memories, past the caches if the CPU can; and a swap
   of words that processes share. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define LINE 64
#define LINES_AHEAD 32 /* of the source: about 100 ns at the pace of the memory */
#define LINES_OF_RUN 16 /* the CPU prefetches the rest */

struct run {
    char *to;
    const char *from;
    size_t bytes;
};

/* Offsets of sources, and as many of targets. */
struct axis {
    const int64_t *from, *to;
    int64_t num;
};

/* The next run: at the sum of one offset of each axis. The last axis steps fastest. */
struct place {
    struct axis axes[3];
    int64_t at[3];
};

static int take(struct place *next, struct run *run) {
    const struct axis *axes = next->axes;
    int64_t *at = next->at;
    if (at[0] == axes[0].num)
        return 0;
    run->from = (const char *)(axes[0].from[at[0]] + axes[1].from[at[1]] + axes[2].from[at[2]]);
    run->to = (char *)(axes[0].to[at[0]] + axes[1].to[at[1]] + axes[2].to[at[2]]);
    if (++at[2] == axes[2].num) {
        at[2] = 0;
        if (++at[1] == axes[1].num) {
            at[1] = 0;
            at[0]++;
        }
    }
    return 1;
}

#if defined(__SSE2__)
/* Stores past the caches do not read the lines that they overwrite: this saves a third of the
   memory's time. They pay from a few lines on; every x86-64 CPU has them.

   The speed of a copy depends on how many lines of the source the CPU has in flight. These are the
   lines of the instructions that it holds together. With AVX a line takes half as many
   instructions: runs of 4 to 64 KiB out of scattered blocks take 10 to 25 % less time. Wider
   instructions brought no more. */
#define STREAMED (2 * LINE)

#ifndef HAS_AVX /* tests compile it without */
#define HAS_AVX __builtin_cpu_supports("avx")
#endif

static void stream_by_sse(char *to, const char *from, size_t lines) {
    for (; lines; lines--, to += LINE, from += LINE) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
}

__attribute__((target("avx"))) static void stream_by_avx(char *to, const char *from, size_t lines) {
    for (; lines; lines--, to += LINE, from += LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)from + 1);
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)to + 1, b);
    }
}

static void copy_run(struct run run) {
    if (run.bytes >= STREAMED) {
        size_t head = -(uintptr_t)run.to % LINE, lines = (run.bytes - head) / LINE;
        size_t streamed = head + lines * LINE;
        if (head)
            memcpy(run.to, run.from, head);
        if (HAS_AVX)
            stream_by_avx(run.to + head, run.from + head, lines);
        else
            stream_by_sse(run.to + head, run.from + head, lines);
        run = (struct run){run.to + streamed, run.from + streamed, run.bytes - streamed};
    }
    if (run.bytes)
        memcpy(run.to, run.from, run.bytes);
}

static void finish(void) { _mm_sfence(); } /* before any notification that the bytes are there */
#else
static void copy_run(struct run run) { memcpy(run.to, run.from, run.bytes); }

static void finish(void) {}
#endif

/* A CPU cannot predict where a run starts. So while one run is copied, the lines of the next ones
   are prefetched.

   With one run in a unit, outer offsets step slowest, so that neighbouring units are merged. With
   several, units step slowest: the outer offsets (the heads of each reader, for example) read one
   unit while a cache still has the bytes beside it.

   Each array has the offsets of sources, then as many of targets. A run that continues the previous
   one on both sides is copied together with it. */
void kvbus_copy_runs(const int64_t *outer, int64_t num_outer, const int64_t *units,
                     int64_t num_units, const int64_t *inner, int64_t num_inner,
                     int64_t run_bytes) {
    struct axis by_outer = {outer, outer + num_outer, num_outer};
    struct axis by_unit = {units, units + num_units, num_units};
    struct axis by_inner = {inner, inner + num_inner, num_inner};
    struct place next = {{by_outer, by_unit, by_inner}, {0, 0, 0}};
    if (num_inner > 1) {
        next.axes[0] = by_unit;
        next.axes[1] = by_outer;
    }
    if (!num_outer || !num_units || !num_inner)
        return;
    struct place ahead = next;
    struct run run = {0, 0, 0}, one, fetched;
    int64_t lines = (run_bytes + LINE - 1) / LINE, num_ahead = 0;
    int64_t unforeseen = lines < LINES_OF_RUN ? lines : LINES_OF_RUN;
    while (take(&next, &one)) {
        while (num_ahead < LINES_AHEAD && take(&ahead, &fetched)) {
            for (int64_t line = 0; line < unforeseen; line++)
                __builtin_prefetch(fetched.from + line * LINE);
            num_ahead += lines;
        }
        num_ahead -= lines;
        if (one.from == run.from + run.bytes && one.to == run.to + run.bytes) {
            run.bytes += run_bytes;
            continue;
        }
        copy_run(run);
        run = (struct run){one.to, one.from, (size_t)run_bytes};
    }
    copy_run(run);
    finish();
}

/* Store a new value if the word has the expected one; return the old value. Every read before the
   call completes before the swap, and no write after the call is visible before the swap. */
uint64_t kvbus_swap_word(uint64_t *word, uint64_t expected, uint64_t value) {
    __atomic_compare_exchange_n(word, &expected, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
