#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_begin.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/detail/prefill_copies.cuh>
#include <penstock/dispatch/detail/prefill_operands.cuh>
#include <penstock/dispatch/detail/warp.cuh>

/// What comes before the products: the list of tiles, the maps of the experts' matrices, and inputs in the order of sorted pairs, as the
/// tensor cores read them.

namespace penstock::inline v0_1::detail {

/// Sorted pairs of one expert that are multiplied together. Their inputs begin at `begin`, a multiple of eight, because the swizzle goes
/// by eight rows: so up to seven pairs of the expert before may come first, whose results nobody writes.
struct prefill_tile {
    std::uint32_t expert;
    std::uint32_t begin;
    std::uint32_t first;
    std::uint32_t end;
};

struct prefill_begin_arguments {
    const std::byte* const* records;
    const void* hidden;        ///< 16-bit
    const std::int32_t* rows;  ///< null: row i of `hidden` is pair i's
    const std::uint32_t* offsets;
    const float* input_scale;
    std::uint32_t k;
    std::uint32_t cols;
    std::uint64_t pitch;  ///< of `hidden`, in elements
    std::uint32_t steps;
    std::uint32_t experts;
    std::uint32_t most_columns;
    prefill_inputs to;
    prefill_tile* tiles;
    std::uint32_t* tile_count;
    CUtensorMap form[2];
    std::uint64_t first_byte[2];  ///< of what is mapped, in the record
    CUtensorMap* maps[2];         ///< [experts]
};

inline constexpr std::uint32_t begin_threads = 256;

/// Lists the tiles, in the order of experts. Called by a block.
__device__ inline void list_tiles(const prefill_begin_arguments& a) {
    __shared__ std::uint32_t of_warp[begin_threads / 32];
    const std::uint32_t warp = threadIdx.x / 32;
    std::uint32_t before = 0;
    for (std::uint32_t e0 = 0; e0 < a.experts; e0 += begin_threads) {
        const std::uint32_t e = e0 + threadIdx.x;
        const std::uint32_t first = e < a.experts ? a.offsets[e] : 0;
        const std::uint32_t end = e < a.experts ? a.offsets[e + 1] : 0;
        const std::uint32_t begin = first / 8 * 8;
        const std::uint32_t tiles = first < end ? (end - begin + a.most_columns - 1) / a.most_columns : 0;
        const std::uint32_t up_to_here = sum_up_to_lane(tiles);
        __syncthreads();
        if (threadIdx.x % 32 == 31) {
            of_warp[warp] = up_to_here;
        }
        __syncthreads();
        std::uint32_t place = before + up_to_here - tiles;
        for (std::uint32_t w = 0; w < begin_threads / 32; ++w) {
            place += w < warp ? of_warp[w] : 0;
            before += of_warp[w];
        }
        const std::uint32_t each = tiles > 0 ? ((end - begin + tiles - 1) / tiles + 7) / 8 * 8 : 0;
        for (std::uint32_t i = 0; i < tiles; ++i) {
            const std::uint32_t from = begin + i * each;
            a.tiles[place + i] = {e, from, larger(from, first), larger(from, smaller(from + each, end))};
        }
    }
    if (threadIdx.x == 0) {
        *a.tile_count = before;
    }
}

template <dtype Type>
__device__ float widen_half(std::uint32_t word, bool high) {
    if constexpr (Type == dtype::bf16) {
        return __uint_as_float(high ? word & 0xffff0000u : word << 16);
    } else {
        float one[2];
        halves_to_floats(word, one[0], one[1]);
        return one[high ? 1 : 0];
    }
}

template <dtype Type>
__device__ std::uint32_t two_halves(float low, float high) {
    std::uint32_t word;
    if constexpr (Type == dtype::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

/// Four inputs from column `c` on, as they are multiplied; beyond the last, zeros. @param scale that of the pair
template <class Operand>
__device__ uint2 load_four(const prefill_begin_arguments& a, const std::uint16_t* row, std::uint32_t c, float scale) {
    constexpr dtype type = Operand::type;
    constexpr dtype multiplied = Operand::by_row ? dtype::f16 : type;
    if (c >= a.cols) {
        return {0, 0};
    }
    uint2 v = __ldg(reinterpret_cast<const uint2*>(row + c));
    if (Operand::by_row || a.input_scale != nullptr) {
        v.x = two_halves<multiplied>(widen_half<type>(v.x, false) * scale, widen_half<type>(v.x, true) * scale);
        v.y = two_halves<multiplied>(widen_half<type>(v.y, false) * scale, widen_half<type>(v.y, true) * scale);
    }
    return v;
}

/// The power of two by which a pair's inputs are divided: 2^-14 of their largest's. Called by a block. @param scale that of the pair
template <dtype Type>
__device__ float divisor_of(const prefill_begin_arguments& a, const std::uint16_t* row, float scale) {
    __shared__ std::uint32_t of_warp[begin_threads / 32];
    std::uint32_t most = 0;  // as bits, so that a NaN or an infinity is the largest
    for (std::uint32_t c = threadIdx.x * 4; c < a.cols; c += begin_threads * 4) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(row + c));
        most = larger(larger(most, v.x & 0x7fffu), larger(v.x >> 16 & 0x7fffu, larger(v.y & 0x7fffu, v.y >> 16 & 0x7fffu)));
    }
    most = __reduce_max_sync(whole_warp, most);
    __syncthreads();  // the maxima of the row before are read
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = most;
    }
    __syncthreads();
    for (const std::uint32_t other : of_warp) {
        most = larger(most, other);
    }
    most = __float_as_uint(::fabsf(widen_half<Type>(most, false) * scale)) >> 23;
    return most < 255 ? __uint_as_float((larger<std::uint32_t>(most, 20) - 14) << 23) : __int_as_float(0x7fc00000);
}

/// Inputs of sorted pair `i`. A lane makes what belongs to 16 bytes, or to 32 where they go through registers in another order.
template <class Operand>
__device__ void place_inputs(const prefill_begin_arguments& a, const std::uint16_t* row, float scale, std::uint64_t i, std::uint32_t unit) {
    constexpr dtype type = Operand::type;
    if constexpr (Operand::scaled) {
        // Eight lanes an atom.
        const std::uint32_t c = unit * 16;
        uint2 v[4];
        std::uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            v[j] = load_four<Operand>(a, row, c + 4 * j, scale);
            most = larger(larger(most, v[j].x & 0x7fffu), larger(v[j].x >> 16 & 0x7fffu, larger(v[j].y & 0x7fffu, v[j].y >> 16 & 0x7fffu)));
        }
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) {
            most = larger(most, __shfl_xor_sync(0xffu << (threadIdx.x & 24), most, distance));
        }
        const float largest = __uint_as_float(most << 16);
        const bool finite = most < 0x7f80u;
        const float s = finite ? ::fmaxf(largest, 0x1p-100f) / 448.0f : __int_as_float(0x7fc00000);
        const float inverse = 1.0f / s;
        std::uint32_t codes[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            asm("{\n .reg .b16 l, h;\n cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n mov.b32 %0, {l, "
                "h};\n}"
                : "=r"(codes[j])
                : "f"(widen_half<type>(v[j].x, false) * inverse), "f"(widen_half<type>(v[j].x, true) * inverse),
                  "f"(widen_half<type>(v[j].y, false) * inverse), "f"(widen_half<type>(v[j].y, true) * inverse));
        }
        *reinterpret_cast<uint4*>(a.to.place(unit / 8, i, unit % 8 * 16)) = {codes[0], codes[1], codes[2], codes[3]};
        if (unit % 8 == 0) {
            a.to.scales[unit / 8 * a.to.rows + i] = s;
        }
    } else if constexpr (Operand::widened) {
        // For every t, `together` inputs from 32 t + first on: their places follow each other.
        constexpr std::uint32_t together = Operand::together;
        const std::uint32_t step = unit / (32 / together);
        const std::uint32_t first = unit % (32 / together) * together;
        std::uint32_t words[2 * together] = {};
#pragma unroll
        for (std::uint32_t k = 0; k < 4 * together; k += 4) {
            const std::uint32_t within = k / together * 32 + k % together;
            const uint2 v = load_four<Operand>(a, row, step * 128 + first + within, scale);
#pragma unroll
            for (std::uint32_t n = 0; n < 4; ++n) {
                const std::uint32_t at = Operand::where(within + n).position;
                words[at / 2] |= ((n / 2 == 0 ? v.x : v.y) >> (n % 2 * 16) & 0xffffu) << (at % 2 * 16);
            }
        }
        const auto start = Operand::where(first);
#pragma unroll
        for (std::uint32_t n = 0; n < together / 2; ++n) {
            *reinterpret_cast<uint4*>(a.to.place(step * 2 + start.atom, i, start.position * 2 + n * 16)) = {
                words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3]};
        }
    } else {
        const uint2 low = load_four<Operand>(a, row, unit * 8, scale);
        const uint2 high = load_four<Operand>(a, row, unit * 8 + 4, scale);
        *reinterpret_cast<uint4*>(a.to.place(unit / 8, i, unit % 8 * 16)) = {low.x, low.y, high.x, high.y};
    }
}

/// @tparam First whether it makes tiles and maps, too
template <class Operand, bool First>
__device__ __forceinline__ void run_begin(const prefill_begin_arguments& a) {
    wait_for_launch_before();
    let_next_launch_begin();
    const std::uint32_t warp = blockIdx.x * (begin_threads / 32) + threadIdx.x / 32;
    const std::uint32_t warps = gridDim.x * (begin_threads / 32);
    const std::uint32_t lane = threadIdx.x % 32;
    if constexpr (First) {
        if (blockIdx.x == 0) {
            list_tiles(a);
        }
        __shared__ __align__(128) CUtensorMap scratch[begin_threads / 32];
        for (std::uint32_t n = warps - 1 - warp; n < 2 * a.experts; n += warps) {
            const std::uint32_t e = n / 2;
            if (a.offsets[e] < a.offsets[e + 1]) {
                place_map(a.form[n % 2], a.records[e] + a.first_byte[n % 2], &scratch[threadIdx.x / 32], a.maps[n % 2] + e);
            }
        }
    }
    const std::uint32_t units = a.steps * (Operand::depth / Operand::unit);  // of a row
    const std::uint32_t shares = (units + 31) / 32;
    const std::uint64_t pairs = a.offsets[a.experts];
    const auto* hidden = static_cast<const std::uint16_t*>(a.hidden);
    const auto pair_of = [&](std::uint64_t i) { return a.rows != nullptr ? static_cast<std::uint64_t>(a.rows[i]) : i; };
    const auto row_of = [&](std::uint64_t pair) { return hidden + (a.rows != nullptr ? pair / a.k : pair) * a.pitch; };
    const auto scale_of = [&](std::uint64_t pair) { return a.input_scale != nullptr ? a.input_scale[pair] : 1.0f; };
    if constexpr (Operand::by_row) {
        for (std::uint64_t i = blockIdx.x; i < pairs; i += gridDim.x) {
            const std::uint64_t pair = pair_of(i);
            const float scale = scale_of(pair);
            const float divisor = divisor_of<Operand::type>(a, row_of(pair), scale);
            for (std::uint32_t unit = threadIdx.x; unit < units; unit += begin_threads) {
                place_inputs<Operand>(a, row_of(pair), scale / divisor, i, unit);
            }
            if (threadIdx.x == 0) {
                a.to.scales[i] = divisor;
            }
        }
    } else {
        for (std::uint64_t n = warp; n < pairs * shares; n += warps) {
            const std::uint64_t i = n / shares;
            const auto unit = static_cast<std::uint32_t>(n % shares) * 32 + lane;
            const std::uint64_t pair = pair_of(i);
            if (unit < units) {
                place_inputs<Operand>(a, row_of(pair), scale_of(pair), i, unit);
            }
        }
    }
}

template <class Operand, bool First>
__global__ __launch_bounds__(begin_threads)
    __attribute__((visibility("hidden"))) void prefill_begin(const __grid_constant__ prefill_begin_arguments a) {
    NV_IF_ELSE_TARGET(NV_HAS_FEATURE_SM_90a, (run_begin<Operand, First>(a);), (static_cast<void>(a); __trap();))
}

}  // namespace penstock::inline v0_1::detail
