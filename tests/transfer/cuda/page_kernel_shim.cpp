// Runs tiered_kv/transfer/cuda/page_kernel.cu on a CPU, one thread after the other, and counts what
// would be wrong on a GPU: accesses that are not aligned, and accesses outside the memory the
// kernel was given. Such accesses are not made.

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Dim3 {
    unsigned x;
};
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

struct uint4 {
    unsigned x, y, z, w;
};

struct Range {
    const unsigned char *begin;
    size_t nbytes;
};

static Range may_read[4], may_write;
static long long misaligned, outside, written;

static bool lies_in(const Range &range, const void *p, size_t nbytes)
{
    const unsigned char *begin = static_cast<const unsigned char *>(p);
    return begin >= range.begin && begin + nbytes <= range.begin + range.nbytes;
}

template <typename Word>
static Word __ldcv(const Word *p)
{
    Word value{};
    misaligned += reinterpret_cast<uintptr_t>(p) % sizeof(Word) != 0;
    for (const Range &range : may_read)
        if (lies_in(range, p, sizeof(Word))) {
            memcpy(&value, p, sizeof(Word));
            return value;
        }
    outside++;
    return value;
}

template <typename Word>
static void __stcs(Word *p, Word value)
{
    misaligned += reinterpret_cast<uintptr_t>(p) % sizeof(Word) != 0;
    if (!lies_in(may_write, p, sizeof(Word))) {
        outside++;
        return;
    }
    written += sizeof(Word);
    memcpy(p, &value, sizeof(Word));
}

#include PAGE_KERNEL

struct Counts {
    long long misaligned, outside, written;
};

extern "C" Counts run(
    unsigned grid, unsigned block,
    unsigned char *storage, size_t storage_bytes, unsigned char *slab, size_t slab_bytes,
    const long long *blocks, const long long *slots, long long pages,
    const long long *pieces, long long pieces_per_page, long long slot_bytes, int saving)
{
    const Range vram{storage, storage_bytes}, host{slab, slab_bytes};
    const size_t numbers = sizeof(long long) * pages;
    may_read[0] = saving ? vram : host;
    may_read[1] = {reinterpret_cast<const unsigned char *>(blocks), numbers};
    may_read[2] = {reinterpret_cast<const unsigned char *>(slots), numbers};
    may_write = saving ? host : vram;
    misaligned = outside = written = 0;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
            copy_pages(storage, slab, blocks, slots, pages, pieces, pieces_per_page, slot_bytes,
                       saving);
    return {misaligned, outside, written};
}
