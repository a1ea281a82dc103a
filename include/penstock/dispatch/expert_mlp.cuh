#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/expert_mlp.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/detail/rows_by_element.cuh>
#include <penstock/dispatch/detail/rows_by_vector.cuh>
#include <penstock/dispatch/detail/rows_transposed.cuh>
#include <penstock/dispatch/expert_work.hpp>

#include <span>
#include <string>

/// The expert MLP: act(gate x, up x), then down. Both launches run the same kernels, which compute pairs of rows: row r of gate and row r
/// of up, or rows 2 r and 2 r + 1 of down. Three kernels: rows_by_vector (rows contiguous and 16-byte aligned), rows_transposed
/// (inputs-first tensors, rows next to each other), rows_by_element (everything else).
///
/// Same bits whatever else is in the call: the path is chosen by the layout alone, every token's slot runs the same instructions, and sums
/// have a fixed order, which neither the number of slots nor the cut into segments of shared memory changes.

namespace penstock::inline v0_1::detail {

enum class mlp_path { vector, transposed, element };

/// The kernel for a stage: by its layout alone.
template <class Format>
mlp_path path_of(const mlp_stage& s) {
    const auto vectorised = [&](const mlp_side& side) {
        const std::uint64_t start = side.m.offset * 8 + side.first * Format::bits;
        return side.m.col_stride == 1 && start % 128 == 0 && side.m.row_stride * Format::bits % 128 == 0 &&
               s.cols % decoder<Format>::per_vector == 0;
    };
    const auto transposed = [](const mlp_side& side) { return side.m.col_stride > 2 && side.m.row_stride <= 2; };
    if (vectorised(s.a) && vectorised(s.b)) {
        return mlp_path::vector;
    }
    return Format::bits >= 8 && transposed(s.a) && transposed(s.b) ? mlp_path::transposed : mlp_path::element;
}

template <class Format>
transposed_loads loads_of(const mlp_stage& s) {
    const std::uint64_t size = Format::bits / 8;
    const auto fits = [&](const mlp_side& side, std::uint64_t elements) {
        return (side.m.offset + side.first * size) % (elements * size) == 0 && side.m.col_stride % elements == 0;
    };
    const bool neighbours = s.a.m.offset + (s.a.first + 1) * size == s.b.m.offset + s.b.first * size;
    if (s.a.m.row_stride == 2 && s.b.m.row_stride == 2 && s.a.m.col_stride == s.b.m.col_stride && neighbours && fits(s.a, 4)) {
        return transposed_loads::alternate;
    }
    return s.a.m.row_stride == 1 && s.b.m.row_stride == 1 && fits(s.a, 2) && fits(s.b, 2) ? transposed_loads::apart
                                                                                          : transposed_loads::single;
}

/// What the kernels of a format cannot read. @throws configuration_error
template <class Format>
void check_side(const mlp_side& side) {
    const matrix_layout& m = side.m;
    if (m.offset % sizeof(typename decoder<Format>::element) != 0) {
        throw configuration_error("penstock: a matrix of " + std::string(name(Format::kind)) + " begins at byte " +
                                  std::to_string(m.offset) + " of the record, which its element size does not divide");
    }
    if (Format::kind == weight_kind::fp8_block128 && m.scale_offset % sizeof(float) != 0) {
        throw configuration_error("penstock: the scales of a matrix begin at byte " + std::to_string(m.scale_offset) +
                                  " of the record, which is no multiple of 4");
    }
}

inline constexpr std::uint32_t input_bytes_per_block = 64 << 10;

template <class Format, int Slots>
void launch_by_vector(mlp_stage s, const mlp_works& works, std::uint32_t count, cudaStream_t stream) {
    constexpr std::uint32_t pairs = vector_shape<Format, Slots>::pairs;
    constexpr std::uint32_t vector = decoder<Format>::per_vector;
    constexpr std::uint32_t step_bytes = Slots * 32 * vector * sizeof(float);
    static_assert(step_bytes <= input_bytes_per_block);
    const auto steps = static_cast<std::uint32_t>(ceil_div(s.cols / vector, 32));
    s.segment = smaller(steps, input_bytes_per_block / step_bytes);
    const auto row_groups = static_cast<std::uint32_t>(ceil_div(s.row_pairs, row_warps * pairs));
    s.groups = 1;
    if (s.segment == steps) {  // rows worth about eight times the inputs a block, if enough blocks remain
        const std::uint32_t wanted = larger<std::uint32_t>(1, 16 * Slots / (pairs * Format::bits));
        const std::uint64_t blocks_enough = 3ull * static_cast<std::uint64_t>(multiprocessors());
        const std::uint64_t affordable = static_cast<std::uint64_t>(row_groups) * count / blocks_enough;
        s.groups = static_cast<std::uint32_t>(smaller<std::uint64_t>(wanted, larger<std::uint64_t>(1, affordable)));
    }
    s.tiles = static_cast<std::uint32_t>(ceil_div(row_groups, s.groups));
    launch(rows_by_vector<Format, Slots>, dim3(s.tiles * count), dim3(row_warps * 32), static_cast<std::size_t>(s.segment) * step_bytes,
           stream, s, works);
}

template <class Format>
void launch_stage(mlp_stage s, const mlp_works& works, std::uint32_t count, std::uint32_t most_tokens, cudaStream_t stream) {
    switch (path_of<Format>(s)) {
        case mlp_path::vector:
            if (most_tokens == 1) {
                launch_by_vector<Format, 1>(s, works, count, stream);
            } else if (most_tokens == 2) {
                launch_by_vector<Format, 2>(s, works, count, stream);
            } else if (most_tokens <= 4) {
                launch_by_vector<Format, 4>(s, works, count, stream);
            } else {
                launch_by_vector<Format, 8>(s, works, count, stream);
            }
            return;
        case mlp_path::transposed:
            if constexpr (Format::bits >= 8) {
                s.tiles = static_cast<std::uint32_t>(ceil_div(s.row_pairs, transposed_rows));
                launch(most_tokens == 1 ? rows_transposed<Format, 1> : rows_transposed<Format, 8>, dim3(s.tiles * count),
                       dim3(transposed_warps * 32), 0, stream, s, works, loads_of<Format>(s));
            }
            return;
        case mlp_path::element:
            s.tiles = static_cast<std::uint32_t>(ceil_div(s.row_pairs, row_warps));
            launch(rows_by_element<Format>, dim3(s.tiles * count), dim3(row_warps * 32), 0, stream, s, works);
            return;
    }
}

/// The body of executor::cuda::experts for one format.
template <class Format>
void run_experts(const expert_layout& layout, std::span<const expert_work> works, const std::int32_t* rows, std::uint32_t k, const float* x,
                 const float* input_scale, float* activated, float* partial, cudaStream_t stream) {
    mlp_stage first = first_stage(layout);
    mlp_stage second = second_stage(layout);
    if (layout.hidden() == 0 || layout.intermediate() == 0 || layout.up.rows != layout.gate.rows || layout.up.cols != layout.gate.cols ||
        layout.down.rows != layout.hidden() || layout.down.cols != layout.intermediate()) {
        throw configuration_error("penstock: an expert's matrices do not fit each other: gate " + std::to_string(layout.gate.rows) + " x " +
                                  std::to_string(layout.gate.cols) + ", up " + std::to_string(layout.up.rows) + " x " +
                                  std::to_string(layout.up.cols) + ", down " + std::to_string(layout.down.rows) + " x " +
                                  std::to_string(layout.down.cols));
    }
    if (k == 0) {
        throw configuration_error("penstock: experts of top-0");
    }
    for (const mlp_side* side : {&first.a, &first.b, &second.a}) {
        check_side<Format>(*side);
    }
    first.rows = rows;
    first.divisor = k;
    first.input = x;
    first.input_scale = input_scale;
    first.output = activated;
    second.rows = rows;
    second.divisor = 1;
    second.input = activated;
    second.output = partial;

    mlp_works batch;
    std::uint32_t count = 0;
    std::uint32_t most_tokens = 0;
    const auto flush = [&] {
        if (count > 0) {
            launch_stage<Format>(first, batch, count, most_tokens, stream);
            launch_stage<Format>(second, batch, count, most_tokens, stream);
        }
        count = 0;
        most_tokens = 0;
    };
    for (const expert_work& work : works) {
        if (work.count == 0) {
            continue;
        }
        if (reinterpret_cast<std::uintptr_t>(work.record) % 16 != 0) {
            throw configuration_error("penstock: the record of expert " + std::to_string(work.expert) +
                                      " does not start at a multiple of 16 bytes");
        }
        batch.of[count++] = {work.record, work.first, work.count};
        most_tokens = larger(most_tokens, work.count);
        if (count == works_per_launch) {
            flush();
        }
    }
    flush();
}

}  // namespace penstock::inline v0_1::detail
