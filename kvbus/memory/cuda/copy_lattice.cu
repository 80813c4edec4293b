/* Copies between two sides, each GPU memory or pinned host memory: runs of one length at each sum of
 * an outer, a unit and an inner offset (`kvbus.planning.Lattice`). A word is the largest type to
 * which all addresses and the length of a run are aligned. Threads of a warp move neighbouring
 * words.
 *
 * `offsets` holds the terms of the sums: outer, unit and inner ones of the sources, then those of
 * the targets. `num_words` is less than 2^31.
 */

struct Shape {
    unsigned outer, units, inner, run_words;
};

template <typename Word>
static __device__ void copy(const long long *offsets, Shape shape, unsigned num_words)
{
    const unsigned per_side = shape.outer + shape.units + shape.inner;
    const long long *sources = offsets, *targets = offsets + per_side;
    const unsigned step = gridDim.x * blockDim.x;
    for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < num_words; at += step) {
        const unsigned word = at % shape.run_words;
        unsigned run = at / shape.run_words;
        const unsigned inner = shape.outer + shape.units + run % shape.inner;
        run /= shape.inner;
        const unsigned unit = shape.outer + run % shape.units;
        const unsigned outer = run / shape.units;
        const Word *source = (const Word *)(sources[outer] + sources[unit] + sources[inner]);
        Word *target = (Word *)(targets[outer] + targets[unit] + targets[inner]);
        target[word] = source[word];
    }
}

#define PARAMETERS                                                                                  \
    const long long *offsets, unsigned outer, unsigned units, unsigned inner, unsigned run_words,   \
        unsigned num_words
#define COPY(Word) copy<Word>(offsets, {outer, units, inner, run_words}, num_words)

extern "C" __global__ void kvbus_copy_16(PARAMETERS) { COPY(uint4); }
extern "C" __global__ void kvbus_copy_8(PARAMETERS) { COPY(unsigned long long); }
extern "C" __global__ void kvbus_copy_4(PARAMETERS) { COPY(unsigned); }
extern "C" __global__ void kvbus_copy_2(PARAMETERS) { COPY(unsigned short); }
extern "C" __global__ void kvbus_copy_1(PARAMETERS) { COPY(unsigned char); }
