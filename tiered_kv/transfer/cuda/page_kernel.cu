// Pages between VRAM and pinned host memory, in one launch.
//
// A page consists of pieces of at most a few KiB; a piece is a row of `pieces`:
//   where it starts in the storage for block 0, bytes from block to block,
//   where it starts in the slot, how long it is.
// One warp copies one piece at a time. A read of host memory takes microseconds, so each lane
// has several in flight before it writes.
//
// Loads are __ldcv ("fetch again"): the CPU rewrites host memory between launches, and no
// cache may answer with what it was. For VRAM this means no more than that lines are not kept.

#define LANES 32
#define IN_FLIGHT 8

template <typename Word>
__device__ __forceinline__ void copy_words(
    const unsigned char *from, unsigned char *to, int nbytes, int lane)
{
    const Word *source = reinterpret_cast<const Word *>(from);
    Word *target = reinterpret_cast<Word *>(to);
    const int words = nbytes / (int)sizeof(Word);
    int i = lane;
    for (; i + (IN_FLIGHT - 1) * LANES < words; i += IN_FLIGHT * LANES) {
        Word held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            held[k] = __ldcv(source + i + k * LANES);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            __stcs(target + i + k * LANES, held[k]);
    }
    for (; i < words; i += LANES)
        __stcs(target + i, __ldcv(source + i));
    for (int b = words * (int)sizeof(Word) + lane; b < nbytes; b += LANES)
        __stcs(to + b, __ldcv(from + b));
}

// `blocks` and `slots` lie in pinned host memory, `pieces` in VRAM, four numbers each.
extern "C" __global__ void __launch_bounds__(1024) copy_pages(
    unsigned char *storage, unsigned char *slab,
    const long long *blocks, const long long *slots, long long pages,
    const long long *pieces, long long pieces_per_page, long long slot_bytes,
    int saving)
{
    const int lane = threadIdx.x % LANES;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long warps = (long long)gridDim.x * blockDim.x / LANES;
    for (long long i = thread / LANES; i < pages * pieces_per_page; i += warps) {
        const long long page = i / pieces_per_page;
        const long long *piece = pieces + 4 * (i % pieces_per_page);
        unsigned char *in_vram = storage + piece[0] + __ldcv(blocks + page) * piece[1];
        unsigned char *in_slab = slab + __ldcv(slots + page) * slot_bytes + piece[2];
        const unsigned char *from = saving ? in_vram : in_slab;
        unsigned char *to = saving ? in_slab : in_vram;
        const int nbytes = (int)piece[3];
        const unsigned long long both = (unsigned long long)from | (unsigned long long)to;
        if (both % 16 == 0)
            copy_words<uint4>(from, to, nbytes, lane);
        else if (both % 8 == 0)
            copy_words<unsigned long long>(from, to, nbytes, lane);
        else if (both % 4 == 0)
            copy_words<unsigned int>(from, to, nbytes, lane);
        else
            copy_words<unsigned char>(from, to, nbytes, lane);
    }
}
