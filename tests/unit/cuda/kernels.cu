/* Kernels of the tests of the fake driver. */
struct Copy {
    const uint4 *from;
    uint4 *to;
    unsigned long long num;
};

__constant__ unsigned SIZES[] = {1, 2};

extern "C" __global__ void __launch_bounds__(256) test_copy(const Copy copy, const unsigned step)
{
    for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < copy.num; at += step)
        copy.to[at] = __ldcs(copy.from + at);
}

extern "C" __global__ void test_order(unsigned *last)
{
    unsigned own[2] = {blockIdx.y, threadIdx.x};
    *last = own[blockIdx.x % SIZES[blockIdx.y % 2]] * 1000 + gridDim.y * 100 + blockDim.x;
}
