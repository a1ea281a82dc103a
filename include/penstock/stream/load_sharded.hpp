#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/model/record_slice.hpp>
#include <penstock/model/shard_plan.hpp>
#include <penstock/stream/named_reads.hpp>
#include <penstock/stream/on_every_place.hpp>
#include <penstock/stream/source_choice.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <concepts>
#include <cstdio>
#include <initializer_list>
#include <ostream>

/// Loads for several GPUs at once: each gets its own bytes alone, over its own link.

namespace penstock::inline v0_1 {

/// Places on these devices, in this order, on streams of the load's own.
[[nodiscard]] inline std::vector<place> on_devices(std::initializer_list<int> devices) {
    std::vector<place> places;
    for (const int device : devices) {
        places.push_back(on_device(device));
    }
    return places;
}

/// What a load for several places is given at run time.
struct shard_options {
    int readers = 0;                  ///< threads that read, of each place; 0: the cores shared out, at least 2 and at most 12 each
    progress_callback callback = {};  ///< all places together
    std::stop_token stop = {};

    /// Opens the files for one place, called by several threads at once; empty: a chosen_source, or, for slices of experts, whose columns are
    /// many small reads, a file_source through the page cache. Each place has a source of its own.
    std::function<std::unique_ptr<byte_source>(const std::vector<std::filesystem::path>&)> open = {};
};

/// What one place got. GB = 1e9 bytes.
struct shard_report {
    place where;
    std::uint64_t bytes = 0;   ///< brought
    std::uint64_t memory = 0;  ///< of the place that they take, gaps included
    double seconds = 0;        ///< from the first read to the arrival of the last byte; staging was there before
    std::uint64_t chunks = 0;
    std::uint64_t reads = 0;
    std::string source;               ///< what the bytes came from
    int readers = 0;                  ///< threads
    double seconds_to_pin = 0;        ///< staging memory had and pinned
    std::uint64_t staging_bytes = 0;  ///< host memory of the stream while it loaded; given back
    std::string staging;              ///< how it was had
    double link_gb_per_s = 0;         ///< see link_gb_per_s(); set by who measured it

    [[nodiscard]] double gb_per_s() const noexcept { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }
};

/// A table: a line for each place; its share of the link where that was measured.
inline std::ostream& operator<<(std::ostream& out, const std::vector<shard_report>& reports) {
    char line[256];
    std::snprintf(line, sizeof line, "%-7s %14s %9s %7s %8s %8s %10s  %s\n", "place", "bytes", "seconds", "GB/s", "of link", "pin (s)",
                  "staging", "source");
    out << line;
    for (const shard_report& r : reports) {
        const std::string name = r.where.on_host() ? "host" : "GPU " + std::to_string(r.where.device);
        char share[16] = "-";
        if (r.link_gb_per_s > 0) {
            std::snprintf(share, sizeof share, "%.1f %%", r.gb_per_s() / r.link_gb_per_s * 100);
        }
        std::snprintf(line, sizeof line, "%-7s %14llu %9.3f %7.2f %8s %8.3f %10s  ", name.c_str(), static_cast<unsigned long long>(r.bytes),
                      r.seconds, r.gb_per_s(), share, r.seconds_to_pin, to_string(bytes{r.staging_bytes}).c_str());
        out << line << r.source << '\n';
    }
    return out;
}

namespace detail {
struct shard_filler;
}

/// The records of one place's experts in one slab of its memory, each at a multiple of 256 bytes: layer after layer, in each layer in the
/// order of shard_plan::experts_of, `stride(layer)` bytes apart. Move-only; made by load_sharded.
class loaded_shard {
public:
    /// Room for the experts that `plan` gives to `gpu`, nothing loaded. @throws out_of_memory, cuda_error, what slice_record() throws
    loaded_shard(const moe_model& model, const shard_plan& plan, std::uint32_t gpu, place where) {
        std::uint64_t size = 0;
        for (std::uint32_t l = 0; l < plan.layers(); ++l) {
            layer& mine = layers_.emplace_back();
            const auto held = plan.experts_of(l, gpu);
            mine.experts.assign(held.begin(), held.end());
            if (plan.sliced()) {
                mine.cut = slice_record(model.layers[l].layout, plan.slice_of(l, gpu), gpu == 0);
                mine.layout = mine.cut.layout;
            } else {
                mine.layout = model.layers[l].layout;
            }
            mine.offset = size;
            mine.stride = round_up(mine.layout.bytes, placement_alignment);
            size += mine.stride * mine.experts.size();
        }
        report_.where = where;
        report_.memory = size;
        if (where.on_host()) {
            host_ = detail::host_region<detail::cuda_pinning>(size, {}, {});
            data_ = host_.data();
        } else {
            const device_guard on(where.device);
            device_ = buffer<std::byte, memory::device>(size);
            data_ = device_.data();
        }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }               ///< in the memory of the place
    [[nodiscard]] std::uint64_t bytes() const noexcept { return report_.memory; }  ///< of the slab
    [[nodiscard]] place where() const noexcept { return report_.where; }

    /// Global ids of the experts it has of a layer (counted as in moe_model::layers), in the order of their records.
    [[nodiscard]] std::span<const std::uint32_t> experts(std::uint32_t l) const { return at(l).experts; }

    /// Layout of its records of a layer: the model's, or that of a slice.
    [[nodiscard]] const expert_layout& layout(std::uint32_t l) const { return at(l).layout; }
    [[nodiscard]] std::uint64_t stride(std::uint32_t l) const { return at(l).stride; }  ///< bytes from one record to the next

    /// How a layer's records were cut, ranges left out; without meaning for a plan of whole experts. fp8 engines need down_scale_column.
    [[nodiscard]] std::uint32_t down_scale_column(std::uint32_t l) const { return at(l).cut.down_scale_column; }

    /// Record of an expert by its global id; nullptr where this place does not hold it.
    /// @throws configuration_error for a layer that is not there
    [[nodiscard]] std::byte* record(std::uint32_t l, std::uint32_t expert) const {
        const layer& mine = at(l);
        const auto it = std::lower_bound(mine.experts.begin(), mine.experts.end(), expert);
        return it == mine.experts.end() || *it != expert
                   ? nullptr
                   : data_ + mine.offset + static_cast<std::uint64_t>(it - mine.experts.begin()) * mine.stride;
    }

    [[nodiscard]] const shard_report& report() const noexcept { return report_; }

private:
    friend struct detail::shard_filler;

    struct layer {
        std::vector<std::uint32_t> experts;
        std::uint64_t offset = 0;
        std::uint64_t stride = 0;
        expert_layout layout;
        record_slice cut;
    };

    /// Hands the transfers that fill the slab to `bring(span)`, at most about `most` at a time: slices have one for each row.
    template <class Bring>
    void in_batches(const moe_model& model, bool sliced, std::size_t most, Bring&& bring) const {
        std::vector<transfer> batch;
        for (std::uint32_t l = 0; l < layers_.size(); ++l) {
            const layer& mine = layers_[l];
            for (std::size_t i = 0; i < mine.experts.size(); ++i) {
                const expert_parts& whole = model.layers[l].experts[mine.experts[i]];
                for (const record_part& part : sliced ? slice_parts(whole, mine.cut) : whole) {
                    transfer one;
                    one.file = part.file;
                    one.offset = part.offset;
                    one.bytes = part.bytes;
                    one.destination = data_ + mine.offset + i * mine.stride + part.record_offset;
                    one.row_bytes = part.row_bytes;
                    batch.push_back(one);
                }
                if (batch.size() >= most) {
                    bring(std::span<const transfer>(batch));
                    batch.clear();
                }
            }
        }
        if (!batch.empty()) {
            bring(std::span<const transfer>(batch));
        }
    }

    [[nodiscard]] const layer& at(std::uint32_t l) const {
        if (l >= layers_.size()) {
            throw configuration_error("penstock: a loaded shard was asked for layer " + std::to_string(l) + ", it has " +
                                      std::to_string(layers_.size()));
        }
        return layers_[l];
    }

    shard_report report_;
    std::vector<layer> layers_;
    std::byte* data_ = nullptr;
    detail::host_region<detail::cuda_pinning> host_;
    buffer<std::byte, memory::device> device_;
};

/// The experts of a model over several places: shards[g] is GPU g's of the plan.
struct sharded_experts {
    shard_plan plan;
    std::vector<loaded_shard> shards;
    double seconds = 0;  ///< of the whole call: memory, staging and all loads

    [[nodiscard]] const loaded_shard& operator[](std::size_t gpu) const { return shards.at(gpu); }

    [[nodiscard]] std::vector<shard_report> reports() const {
        std::vector<shard_report> all;
        for (const loaded_shard& s : shards) {
            all.push_back(s.report());
        }
        return all;
    }
};

/// Lists of tensors over several places.
struct sharded_tensors {
    std::vector<loaded_tensors> parts;
    std::vector<shard_report> reports;
    double seconds = 0;  ///< of the whole call
};

namespace detail {

/// What load_sharded does with a shard that is not handed out yet.
struct shard_filler {
    static shard_report& report(loaded_shard& shard) noexcept { return shard.report_; }

    template <class Bring>
    static void in_batches(const loaded_shard& shard, const moe_model& model, bool sliced, Bring&& bring) {
        shard.in_batches(model, sliced, std::size_t{1} << 20, bring);
    }
};

/// One stream for one place: had, its staging pinned, run, and gone. `load(stream, where)` brings the bytes.
template <class Stream, class Load>
void run_at(place where, int readers, bool anything, shard_report& report, Load&& load) {
    using clock = std::chrono::steady_clock;
    const auto since = [](clock::time_point begin) { return std::chrono::duration<double>(clock::now() - begin).count(); };
    report.where = where;
    std::optional<stream> own;
    if (!where.on_host() && where.stream == nullptr) {
        where.stream = own.emplace(where.device).get();
    }
    Stream loader({.readers = readers, .device = where.device});
    report.readers = loader.readers();
    if (!where.on_host() && anything) {
        const auto begin = clock::now();
        loader.reserve(where.device);
        report.seconds_to_pin = since(begin);
    }
    load(loader, where);
    report.staging_bytes = loader.staging_bytes();
    report.staging = loader.staging_how();
}

/// Bytes that `plan` gives to a GPU, without gaps.
[[nodiscard]] inline std::uint64_t bytes_to_bring(const moe_model& model, const shard_plan& plan, std::uint32_t gpu) {
    std::uint64_t sum = 0;
    for (std::uint32_t l = 0; l < plan.layers(); ++l) {
        std::uint64_t each = 0;
        if (plan.sliced()) {
            for (const record_range& r : slice_record(model.layers[l].layout, plan.slice_of(l, gpu), gpu == 0).ranges) {
                each += r.bytes;
            }
        }
        for (const std::uint32_t e : plan.experts_of(l, gpu)) {
            for (const record_part& part : model.layers[l].experts[e]) {
                sum += plan.sliced() ? 0 : part.bytes;
            }
            sum += each;
        }
    }
    return sum;
}

inline void add(shard_report& to, const stream_report& r) {
    to.bytes += r.bytes;
    to.seconds += r.seconds;
    to.chunks += r.chunks;
    to.reads += r.reads;
    to.source = r.source;
}

/// "expert 5 of layer 3", to which a byte of the model's files belongs; empty where it is none's.
[[nodiscard]] inline std::string expert_at(const moe_model& model, std::uint32_t file, std::uint64_t offset) {
    for (const moe_layer_model& l : model.layers) {
        for (std::size_t e = 0; e < l.experts.size(); ++e) {
            for (const record_part& part : l.experts[e]) {
                if (part.file == file && part.offset <= offset && offset < part.offset + part.bytes) {
                    return "expert " + std::to_string(e) + " of layer " + std::to_string(l.layer);
                }
            }
        }
    }
    return {};
}

[[nodiscard]] inline std::unique_ptr<byte_source> open_for(const shard_options& options, const std::vector<std::filesystem::path>& files,
                                                           bool sliced) {
    if (options.open) {
        return options.open(files);
    }
    if (sliced) {
        return std::make_unique<file_source>(files);
    }
    return std::make_unique<chosen_source>(files);
}

[[nodiscard]] inline int readers_of_each(int wanted, std::size_t places) noexcept {
    const auto cores = static_cast<int>(usable_cores());
    return wanted > 0 ? wanted : std::clamp(cores / static_cast<int>(larger<std::size_t>(places, 1)), 2, 12);
}

inline void require_places(std::span<const place> places, std::size_t wanted, const char* what) {
    if (places.size() != wanted) {
        throw configuration_error("penstock: load_sharded was given " + std::to_string(places.size()) + " places for " +
                                  std::to_string(wanted) + " " + what);
    }
    for (const place& where : places) {
        if (!where.on_host()) {
            require_device(where.device, "load_sharded");
        }
    }
}

}  // namespace detail

/// Loads a model's experts: to places[g] those that `plan` gives to GPU g, whole or sliced, and nothing else. All places at once, each by a
/// thread with a stream (readers, staging near the device, link) and a source of its own, joined before this returns. A place may be a host
/// place, and two places may be one device. For a device place with a stream, copies are enqueued there; all are over on return.
/// @throws configuration_error for a plan of another model or another number of places, a device that is not there; else what failed first,
/// its message naming the place: the other places then stop, and everything is given back. cancelled through options.stop
template <class Stream = weight_stream<>>
[[nodiscard]] sharded_experts load_sharded(const moe_model& model, const shard_plan& plan, std::span<const place> places,
                                           const shard_options& options = {}) {
    const auto begin = std::chrono::steady_clock::now();
    detail::require_places(places, plan.gpus(), "GPUs of the plan");
    bool same = plan.layers() == model.layers.size();
    for (std::uint32_t l = 0; same && l < plan.layers(); ++l) {
        same = plan.experts(l) == model.layers[l].experts.size();
    }
    if (!same) {
        throw configuration_error("penstock: load_sharded was given a plan of another model: its layers or experts differ");
    }
    std::vector<std::optional<loaded_shard>> made(places.size());
    const int readers = detail::readers_of_each(options.readers, places.size());
    std::uint64_t total = 0;
    for (std::uint32_t g = 0; options.callback && g < plan.gpus(); ++g) {
        total += detail::bytes_to_bring(model, plan, g);
    }
    detail::shared_progress progress(options.callback, total, places.size());
    detail::on_every_place(places, options.stop, [&](std::size_t i, const std::stop_token& stop) {
        loaded_shard& shard = made[i].emplace(model, plan, static_cast<std::uint32_t>(i), places[i]);
        shard_report& report = detail::shard_filler::report(shard);
        detail::run_at<Stream>(places[i], readers, shard.bytes() > 0, report, [&](Stream& loader, place where) {
            const std::unique_ptr<byte_source> opened = detail::open_for(options, model.files, plan.sliced());
            detail::named_reads files(
                *opened, [&model](std::uint32_t file, std::uint64_t offset) { return detail::expert_at(model, file, offset); });
            detail::shard_filler::in_batches(shard, model, plan.sliced(), [&](std::span<const transfer> batch) {
                detail::add(report, loader.run(batch, files, where, progress.of(i, report.bytes), stop));
            });
        });
    });
    sharded_experts result{plan, {}, 0};
    for (std::optional<loaded_shard>& shard : made) {
        result.shards.push_back(std::move(*shard));
    }
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
}

/// The same from what `describe` understands, a checkpoint.
template <class Stream = weight_stream<>, class Weights>
    requires requires(const Weights& w) {
        { describe(w) } -> std::convertible_to<moe_model>;
    }
[[nodiscard]] sharded_experts load_sharded(const Weights& weights, const shard_plan& plan, std::span<const place> places,
                                           const shard_options& options = {}) {
    return load_sharded<Stream>(describe(weights), plan, places, options);
}

/// Loads lists of tensors (see split_by_bytes): lists[i] to places[i], as above.
template <class Stream = weight_stream<>>
[[nodiscard]] sharded_tensors load_sharded(std::span<const tensor_list> lists, std::span<const place> places,
                                           const shard_options& options = {}) {
    const auto begin = std::chrono::steady_clock::now();
    detail::require_places(places, lists.size(), "lists of tensors");
    const int readers = detail::readers_of_each(options.readers, places.size());
    std::uint64_t total = 0;
    for (const tensor_list& list : lists) {
        for (const tensor_info& t : list.tensors) {
            total += t.bytes;
        }
    }
    sharded_tensors result;
    result.reports.resize(places.size());
    std::vector<std::optional<loaded_tensors>> made(places.size());
    detail::shared_progress progress(options.callback, total, places.size());
    detail::on_every_place(places, options.stop, [&](std::size_t i, const std::stop_token& stop) {
        shard_report& report = result.reports[i];
        detail::run_at<Stream>(places[i], readers, !lists[i].tensors.empty(), report, [&](Stream& loader, place) {
            const std::unique_ptr<byte_source> files = detail::open_for(options, lists[i].files, false);
            made[i].emplace(loader.load(lists[i], *files, places[i], progress.of(i, 0), stop));
            detail::add(report, made[i]->report());
            report.memory = made[i]->bytes();
        });
    });
    for (std::optional<loaded_tensors>& part : made) {
        result.parts.push_back(std::move(*part));
    }
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
}

}  // namespace penstock::inline v0_1
