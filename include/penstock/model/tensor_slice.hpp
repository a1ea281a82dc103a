#pragma once

#include <penstock/error.hpp>
#include <penstock/model/tensor.hpp>
#include <penstock/units.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

/// Which bytes of a file are a part of a tensor: what tensor parallelism and stacked experts read. Plain arithmetic, no files.

namespace penstock::inline v0_1 {

/// Indices [first, first + count).
struct index_range {
    std::uint64_t first = 0;
    std::uint64_t count = 0;

    [[nodiscard]] constexpr std::uint64_t end() const noexcept { return first + count; }
    friend constexpr bool operator==(const index_range&, const index_range&) = default;
};

/// Part number `part` of `parts` of the indices [0, extent), in order and without gaps, cut at multiples of `unit`: sizes differ by at most
/// one unit, the larger ones first (the last index may end a ragged unit). 30 by 8 is 4,4,4,4,4,4,3,3.
/// @throws configuration_error for no parts, a unit of 0, or a part that is not there
[[nodiscard]] inline index_range share_of(std::uint64_t extent, std::uint64_t parts, std::uint64_t part, std::uint64_t unit = 1) {
    if (parts == 0 || unit == 0 || part >= parts) {
        throw configuration_error("penstock: part " + std::to_string(part) + " of " + std::to_string(parts) + " in units of " +
                                  std::to_string(unit) + " does not exist");
    }
    const std::uint64_t units = extent / unit + (extent % unit != 0);
    const std::uint64_t each = units / parts, more = units % parts;
    const std::uint64_t first = part * each + smaller(part, more), count = each + (part < more ? 1 : 0);
    const std::uint64_t begin = smaller(first * unit, extent);
    return {begin, smaller((first + count) * unit, extent) - begin};
}

/// One run of bytes in a file. `row_bytes`: of the rows it consists of, as transfer::row_bytes wants it; 0: rows do not fill bytes.
struct slice_range {
    std::uint64_t offset = 0;  ///< from the start of the file
    std::uint64_t bytes = 0;
    std::uint64_t row_bytes = 0;

    friend constexpr bool operator==(const slice_range&, const slice_range&) = default;
};

/// A part of a tensor, dense and row-major once its ranges are put one after another.
struct tensor_slice {
    dtype type = dtype::u8;
    std::vector<std::uint64_t> shape;
    std::uint32_t file = 0;
    std::uint64_t bytes = 0;
    std::vector<slice_range> ranges;  ///< in the order of the destination
};

namespace detail {

[[noreturn]] inline void refuse_slice(const tensor_info& t, const std::string& problem) {
    std::string shape;
    for (const std::uint64_t extent : t.shape) {
        shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
    }
    throw configuration_error("penstock: tensor \"" + t.name + "\", " + std::string(name(t.type)) + " [" + shape + "]: " + problem);
}

/// Elements of dimensions [from, to) of a tensor. @throws configuration_error where they are too many to count
[[nodiscard]] inline std::uint64_t elements_of(const tensor_info& t, std::size_t from, std::size_t to) {
    std::uint64_t product = 1;
    for (std::size_t d = from; d < to; ++d) {
        if (t.shape[d] != 0 && product > std::numeric_limits<std::uint64_t>::max() / 64 / t.shape[d]) {
            refuse_slice(t, "has more elements than can be counted");
        }
        product *= t.shape[d];
    }
    return product;
}

/// Whole bytes that `elements` take. @throws configuration_error where they end inside a byte
[[nodiscard]] inline std::uint64_t whole_bytes(const tensor_info& t, std::uint64_t elements, const char* what) {
    const std::uint64_t n = elements * bits(t.type);
    if (n % 8 != 0) {
        refuse_slice(t, std::string(what) + " falls inside a byte: elements have " + std::to_string(bits(t.type)) +
                            " bits, so a slice begins and ends at multiples of " + std::to_string(bits(t.type) % 4 == 0 ? 2 : 4) +
                            " of them");
    }
    return n / 8;
}

}  // namespace detail

/// The part `range` of dimension `dimension`; all of the others. Dimension 0 is one range of bytes, dimension 1 one range a row, dimension d
/// one for each index of the dimensions before it; the whole of a dimension is one range.
/// @throws configuration_error naming the tensor for a dimension or range that is not there, a border inside a byte (F4, F6), or bytes that
/// do not follow from shape and type
[[nodiscard]] inline tensor_slice slice(const tensor_info& t, std::size_t dimension, index_range range) {
    if (dimension >= t.shape.size()) {
        detail::refuse_slice(t, "has no dimension " + std::to_string(dimension));
    }
    const std::uint64_t extent = t.shape[dimension];
    if (range.first > extent || range.count > extent - range.first) {
        detail::refuse_slice(t, "a slice of " + std::to_string(range.count) + " from " + std::to_string(range.first) +
                                    " on reaches beyond dimension " + std::to_string(dimension));
    }
    if (detail::whole_bytes(t, detail::elements_of(t, 0, t.shape.size()), "its end") != t.bytes) {
        detail::refuse_slice(t, std::to_string(t.bytes) + " bytes do not follow from type and shape");
    }
    tensor_slice made{.type = t.type, .shape = t.shape, .file = t.file, .bytes = 0, .ranges = {}};
    made.shape[dimension] = range.count;
    const std::uint64_t inner = detail::elements_of(t, dimension + 1, t.shape.size());
    const std::uint64_t outer = range.count == extent ? 1 : detail::elements_of(t, 0, dimension);
    const std::uint64_t run = range.count == extent ? t.bytes : detail::whole_bytes(t, range.count * inner, "its length");
    const std::uint64_t first = range.count == extent ? 0 : detail::whole_bytes(t, range.first * inner, "its beginning");
    const std::uint64_t step = outer > 1 ? detail::whole_bytes(t, extent * inner, "a row") : 0;
    const std::uint64_t row_bits = made.shape.back() * bits(t.type);
    made.bytes = outer * run;
    if (run > 0) {
        made.ranges.reserve(outer);
        for (std::uint64_t i = 0; i < outer; ++i) {
            made.ranges.push_back({t.offset + i * step + first, run, row_bits % 8 == 0 ? row_bits / 8 : 0});
        }
    }
    return made;
}

/// The indices `range` of the first dimension as a tensor of its own, of the same name, which weight_stream::load takes like any other.
/// @throws as slice()
[[nodiscard]] inline tensor_info part_of(const tensor_info& t, index_range range) {
    tensor_slice part = slice(t, 0, range);
    return {t.name, t.type, std::move(part.shape), t.file, part.ranges.empty() ? t.offset : part.ranges[0].offset, part.bytes};
}

/// Index `i` of the first dimension, without that dimension: one expert of a stack. @throws as slice()
[[nodiscard]] inline tensor_info element_of(const tensor_info& t, std::uint64_t i) {
    tensor_info one = part_of(t, {i, 1});
    one.shape.erase(one.shape.begin());
    return one;
}

/// A slice of a matrix with block scales, and the slice of its scales: every scale that it touches.
/// Scale of weight (r, c) of the slice: scales((r + first_row) / block, (c + first_column) / block), both counted in the slice.
struct block_scaled_slice {
    tensor_slice weights;
    tensor_slice scales;
    std::uint32_t first_row = 0;     ///< of the slice, inside its first block
    std::uint32_t first_column = 0;  ///< the same for columns
};

/// Rows (dimension 0) or columns (dimension 1) of a matrix [rows, cols] with scales [ceil(rows / block), ceil(cols / block)], as fp8 has
/// them. A slice need not begin or end with a block: two slices that cut one both carry its scale.
/// @throws configuration_error naming the tensor: no matrix, scales of another shape, and as slice()
[[nodiscard]] inline block_scaled_slice slice_blocks(const tensor_info& weights, const tensor_info& scales, std::size_t dimension,
                                                     index_range range, std::uint32_t block = 128) {
    if (block == 0 || weights.shape.size() != 2 || scales.shape.size() != 2) {
        detail::refuse_slice(weights.shape.size() != 2 ? weights : scales,
                             "a matrix with scales for blocks of " + std::to_string(block) + " is wanted");
    }
    for (std::size_t d = 0; d < 2; ++d) {
        if (const std::uint64_t wanted = weights.shape[d] / block + (weights.shape[d] % block != 0); scales.shape[d] != wanted) {
            detail::refuse_slice(scales, std::to_string(wanted) + " scales are wanted in dimension " + std::to_string(d) +
                                             " for tensor \"" + weights.name + "\"");
        }
    }
    block_scaled_slice made;
    made.weights = slice(weights, dimension, range);
    const std::uint64_t first = range.first / block;
    made.scales = slice(scales, dimension, {range.count == 0 ? 0 : first, range.count == 0 ? 0 : ceil_div(range.end(), block) - first});
    (dimension == 0 ? made.first_row : made.first_column) = static_cast<std::uint32_t>(range.first % block);
    return made;
}

}  // namespace penstock::inline v0_1
