/* Digests of pieces of mapped memory, each gathered into its canonical order first. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64
#define PREFETCHED 512 /* of each row of the next piece */

typedef uint64_t (*hash_function)(const void *, size_t);

/* A piece is one span of positions at one corner: number span * num_corners + corner. Its rows
   start at the corner plus the offset of each position, and have runs at equal steps. ``buffer``
   has room for the longest piece. */
void kvbus_digest_pieces(hash_function hash, const int64_t *corners, int64_t num_corners,
                         const int64_t *positions, const int64_t *edges, const int64_t *pieces,
                         int64_t num_pieces, int64_t num_runs, int64_t run_bytes,
                         int64_t step_bytes, char *buffer, uint64_t *digests) {
    for (int64_t i = 0; i < num_pieces; i++) {
        const int64_t span = pieces[i] / num_corners;
        const int64_t corner = corners[pieces[i] % num_corners];
        const int64_t first = edges[span], stop = edges[span + 1];
        int is_even = num_runs == 1;
        for (int64_t at = first + 1; is_even && at < stop; at++)
            is_even = positions[at] - positions[at - 1] == run_bytes;
        if (is_even) { /* it lies in one piece as it is */
            const char *piece = (const char *)(corner + positions[first]);
            digests[i] = hash(piece, (size_t)((stop - first) * run_bytes));
            continue;
        }
        /* The rows of the next piece: a head, say, that lies beside this one. No CPU foresees it. */
        const int64_t next = i + 1 < num_pieces ? corners[pieces[i + 1] % num_corners] : corner;
        char *to = buffer;
        for (int64_t at = first; at < stop; at++) {
            const char *from = (const char *)(corner + positions[at]);
            const char *ahead = (const char *)(next + positions[at]);
            for (int64_t line = 0; line < PREFETCHED && line < run_bytes; line += LINE)
                __builtin_prefetch(ahead + line);
            for (int64_t run = 0; run < num_runs; run++, to += run_bytes)
                memcpy(to, from + run * step_bytes, (size_t)run_bytes);
        }
        digests[i] = hash(buffer, (size_t)(to - buffer));
    }
}
