#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/prefetch.hpp>
#include <penstock/policy/scheduling.hpp>
#include <penstock/stream/loaded_tensors.hpp>
#include <penstock/stream/named_reads.hpp>
#include <penstock/stream/source_choice.hpp>
#include <penstock/stream/stream_engine.hpp>

#include <thread>

namespace penstock::inline v0_1 {

/// What a weight stream is given at run time.
struct stream_options {
    int readers =
        0;  ///< threads that read; 0: three for four usable cores, at least 2, at most 12, beyond which a PCIe 5 link gains nothing
    int device = -1;                 ///< the GPU next to which staging should lie; negative: the one that is loaded first
    std::uint32_t issue_window = 2;  ///< chunks on one GPU's copy engine at a time, of those that wait for their turn there
    bool on_demand_waits = false;  ///< for its turn too: for loads on demand that compete with one another. Else they are enqueued at once
    std::uint32_t slots_kept =
        1;  ///< staging slots for what is on demand alone, where the scheduler puts that first; one is for all at least
    const link_watch* watch = nullptr;  ///< what else is on the link, for governors; outlives the stream
    timeline* kept_in = nullptr;        ///< where what happens is kept, if it is wanted; outlives the stream
    bytes read_bytes{1u << 20};         ///< what a reader reads at a time: a chunk is filled by several
};

/// Brings bytes from files or host memory to host memory or to a GPU. It owns its reader threads, which are started once and joined by its
/// destructor, and its staging memory, which is allocated when bytes first have to pass through it, or by reserve(). Several threads may
/// start loads at once; all loads share the readers, the staging and one scheduler queue, which is asked at every chunk whose turn it is.
///
/// To the host, readers read straight into the destination. To a device, they fill staging slots and enqueue the copies on the place's
/// stream; a slot is filled again when its copy is over. Pinned memory goes to a device without staging: what is on demand is enqueued by
/// start() itself. With memory::pageable, copies to a device are synchronous, one chunk at a time: the naive way, for comparison.
///
/// Reading ahead and being on the link are two numbers: the slots of staging, and `issue_window`. Prefetched and background chunks, staged or
/// pinned, wait until fewer than that are on the device's copy engine and nothing on demand is, and go in the scheduler's order of precedence;
/// so an urgent load of the same device stands behind that many chunks, and not behind a load or a full ring, of which `slots_kept` slots are
/// its own. throttled<Scheduler, Governor> holds them back further. A stream
/// that is held up for long can come to hold all staging: give every device a weight stream of its own, with readers and staging near it. So may a
/// load to host memory wait behind chunks that have no room in staging.
template <class Memory, class Chunking, class Prefetch, class Scheduler>
class basic_weight_stream {
    static_assert(memory_policy<Memory>, "penstock: weight_stream's memory kind lacks host_accessible, device_accessible or page_aligned");
    static_assert(Memory::host_accessible,
                  "penstock: weight_stream stages in host memory; memory::device, memory::peer and what contains them are destinations");
    static_assert(allocating_memory<Memory> || !Memory::host_accessible,
                  "penstock: weight_stream allocates its staging; memory::registered and memory::tiered pin or combine memory that exists");
    static_assert(chunking_policy<Chunking>, "penstock: weight_stream's chunking offers bytes_per_chunk(row_bytes, total_bytes)");
    static_assert(prefetch_policy<Prefetch>, "penstock: weight_stream's prefetch depth offers chunks_ahead(chunk_bytes)");
    static_assert(host_scheduler<Scheduler>, "penstock: weight_stream needs a scheduler with a host queue");

public:
    using memory = Memory;
    using chunking = Chunking;
    using prefetch = Prefetch;
    using scheduler = Scheduler;
    using ticket = penstock::ticket;

    explicit basic_weight_stream(stream_options options = {}, Chunking chunking = {}, Prefetch prefetch = {})
        : chunking_(chunking),
          slot_bytes_(larger<std::uint64_t>(chunking.bytes_per_chunk(0, unbounded_slot_bytes), 1)),
          slots_(larger<std::uint32_t>(prefetch.chunks_ahead(slot_bytes_), 1)),
          readers_(options.readers > 0 ? options.readers : default_readers()),
          engine_(std::make_shared<engine>(
              readers_, slot_bytes_, slots_, options.device, options.issue_window, options.read_bytes,
              detail::engine_options{options.slots_kept, options.on_demand_waits, options.watch, options.kept_in})) {}

    basic_weight_stream(const basic_weight_stream&) = delete;
    basic_weight_stream& operator=(const basic_weight_stream&) = delete;

    /// Ends running loads (their tickets throw `cancelled`) and joins the readers; waits for the copies out of staging.
    ~basic_weight_stream() { engine_->stop(); }

    [[nodiscard]] int readers() const noexcept { return readers_; }

    /// Host memory that staging takes when it is needed, at most.
    [[nodiscard]] std::uint64_t staging_bytes_needed() const noexcept { return detail::staging<Memory>::bytes_needed(slot_bytes_, slots_); }

    /// Host memory that staging has taken.
    [[nodiscard]] std::uint64_t staging_bytes() const { return engine_->staging_bytes(); }

    /// How staging was had: "huge pages, registered", ...
    [[nodiscard]] std::string staging_how() const { return engine_->staging_how(); }

    /// Allocates staging now instead of at the first load that needs it. Without a GPU no load does, and this does nothing.
    /// @throws out_of_memory, cuda_error
    void reserve(int device = 0) {
        if (device_count() > 0) {
            engine_->reserve_staging(device);
        }
    }

    /// What start() would move and how it would cut it.
    [[nodiscard]] transfer_plan<Chunking> plan(std::span<const transfer> transfers) const {
        return transfer_plan<Chunking>(transfers, chunking_);
    }

    /// Starts to bring `transfers`. Returns at once, or, for what lies in pinned memory and goes to a device, when the copies are enqueued.
    /// Bytes that the source has in locked memory (see byte_source::in_place) are such; to lock them may take its time first.
    /// Source, source memory and destination outlive the ticket, and the copies enqueued on `where.stream`.
    /// @throws configuration_error for a device that is not there, a stream under capture (a load is not capturable), a transfer without a
    /// destination; out_of_memory, cuda_error where staging cannot be had. What goes wrong later is the ticket's to throw.
    [[nodiscard]] ticket start(std::span<const transfer> transfers, byte_source& source, place where, progress_callback callback = {},
                               std::stop_token stop = {}) {
        if (!where.on_host()) {
            require_device(where.device, "weight_stream");
            const device_guard on(where.device);
            if (where.stream == cudaStreamPerThread) {
                throw configuration_error(
                    "penstock: weight_stream enqueues copies from several threads, for each of which "
                    "cudaStreamPerThread is another stream");
            }
            if (is_capturing(where.stream)) {
                throw configuration_error("penstock: weight_stream reads files on the host, so a load cannot be captured in a CUDA graph");
            }
        }
        std::vector<transfer> in_place;
        if (!where.on_host() && Memory::device_accessible) {
            in_place = detail::taken_in_place(transfers, source);
        }
        const std::span<const transfer> all = in_place.empty() ? transfers : std::span<const transfer>(in_place);
        transfer_plan<Chunking> planned(all, suited_to(source, all));
        auto load = std::make_shared<detail::load_state>(std::move(planned).take(), source, where, std::move(callback), std::move(stop));
        engine_->start(load);
        return ticket(engine_, std::move(load));
    }

    /// start(), wait(), and for a device the synchronisation of its stream: every byte is at its place when this returns, and no copy of
    /// this load runs any more when it throws. To a device, the callback counts chunks whose copies are enqueued, at most the staging ahead
    /// of what has arrived, and bytes == total is told when all have arrived. @throws what start() and ticket::wait() throw
    stream_report run(std::span<const transfer> transfers, byte_source& source, place where, progress_callback callback = {},
                      std::stop_token stop = {}) {
        return run_beside(transfers, source, where, std::move(callback), std::move(stop), [] {});
    }

    /// Loads tensors into one new buffer at `where`; without a stream, on one of its own. Returns when they are there. How the files are
    /// read is chosen by what is found and by `how` (see chosen_source); for several loads of the same bytes, make one chosen_source and
    /// pass it to each. The files are held against the list first.
    /// @throws io_error for a file that is missing or too short, and what run() throws; nothing is kept then
    [[nodiscard]] loaded_tensors load(const tensor_list& list, place where, progress_callback callback = {}, std::stop_token stop = {},
                                      source_options how = {}) {
        chosen_source files(list.files, how);
        return load(list, files, where, std::move(callback), std::move(stop));
    }

    /// The same from a source of the caller's, which has the list's files by the same numbers.
    [[nodiscard]] loaded_tensors load(const tensor_list& list, byte_source& files, place where, progress_callback callback = {},
                                      std::stop_token stop = {}) {
        if (!where.on_host()) {
            require_device(where.device, "weight_stream");
        }
        check_sizes(list, files);
        loaded_tensors tensors;
        tensors.where_ = where;
        tensors.make_room(list);
        return filled(list, std::move(tensors), files, std::move(callback), std::move(stop), true);
    }

    /// The same into room that was made for this list before, or that held its tensors: nothing is allocated.
    /// @throws configuration_error for room of another list; what is thrown takes the room with it
    [[nodiscard]] loaded_tensors load(const tensor_list& list, loaded_tensors room, byte_source& files, progress_callback callback = {},
                                      std::stop_token stop = {}) {
        check_sizes(list, files);
        return filled(list, std::move(room), files, std::move(callback), std::move(stop), false);
    }

private:
    /// The files' sizes, held against the list before anything is taken or moved.
    static void check_sizes(const tensor_list& list, byte_source& files) {
        std::vector<std::uint64_t> sizes(list.files.size(), not_asked);
        std::uint32_t file = ~std::uint32_t{0};
        std::uint64_t size = 0;
        for (const tensor_info& t : list.tensors) {
            if (t.file != file) {
                file = t.file;
                size = file < sizes.size() && sizes[file] != not_asked ? sizes[file] : files.size(file);
                if (file < sizes.size()) {
                    sizes[file] = size;
                }
            }
            if (t.bytes > size || t.offset > size - t.bytes) {
                throw io_error(files.name(t.file) + ": tensor \"" + t.name + "\" ends at byte " + std::to_string(t.offset + t.bytes) +
                               " of the file, which holds " + std::to_string(size));
            }
        }
    }

    /// Views are made, or held against the list, while the bytes are on their way.
    loaded_tensors filled(const tensor_list& list, loaded_tensors tensors, byte_source& files, progress_callback callback,
                          std::stop_token stop, bool make_views) {
        place where = tensors.where_;
        std::optional<stream> own;
        if (!where.on_host() && where.stream == nullptr) {
            where.stream = own.emplace(where.device).get();
        }
        detail::named_reads named(files, [&list](std::uint32_t file, std::uint64_t offset) {
            for (const tensor_info& t : list.tensors) {
                if (t.file == file && t.offset <= offset && offset < t.offset + t.bytes) {
                    return "tensor \"" + t.name + "\"";
                }
            }
            return std::string();
        });
        const std::vector<transfer> transfers = tensors.transfers(list);
        tensors.report_ = run_beside(transfers, named, where, std::move(callback), std::move(stop), [&] {
            if (make_views) {
                tensors.make_views(list);
            } else {
                tensors.check_names_of(list);
            }
        });
        tensors.report_.place_bytes = tensors.bytes();
        return tensors;
    }

    /// run(), with work for the calling thread while the bytes are on their way. What it throws ends the load.
    template <class Work>
    stream_report run_beside(std::span<const transfer> transfers, byte_source& source, place where, progress_callback callback,
                             std::stop_token stop, Work&& work) {
        const auto started = std::chrono::steady_clock::now();
        progress_callback before_the_end;
        if (callback && !where.on_host()) {
            before_the_end = [&callback](const progress& now) {
                if (now.bytes < now.total) {
                    callback(now);
                }
            };
        }
        ticket load = start(transfers, source, where, where.on_host() ? callback : before_the_end, std::move(stop));
        try {
            work();
            load.wait();
        } catch (...) {
            load = {};  // no copy is enqueued after this
            if (!where.on_host() && cudaStreamSynchronize(where.stream) != cudaSuccess && detail::cuda_usable()) {
                static_cast<void>(cudaGetLastError());
            }
            throw;
        }
        stream_report report = load.report();
        report.staging_bytes = staging_bytes();
        if (!where.on_host()) {
            const device_guard on(where.device);
            check(cudaStreamSynchronize(where.stream), "cudaStreamSynchronize");
            report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
            if (callback) {
                callback({report.bytes, report.bytes, report.seconds});
            }
        }
        return report;
    }

    /// The chunking, held to what suits the source where it lets itself be.
    [[nodiscard]] Chunking suited_to([[maybe_unused]] const byte_source& source, [[maybe_unused]] std::span<const transfer> all) const {
        if constexpr (requires { chunking_.within(std::uint64_t{}); }) {
            for (const transfer& t : all) {
                if (t.memory == nullptr) {
                    return chunking_.within(source.chunk_bytes(t.file));
                }
            }
        }
        return chunking_;
    }

    static constexpr std::uint64_t not_asked = byte_source::unknown_size - 1;

    using engine = detail::stream_engine<Memory, Scheduler>;

    /// Slot size for a chunking that has no size of its own (whole, rows): its chunks pass through staging slot by slot.
    static constexpr std::uint64_t unbounded_slot_bytes = std::uint64_t{4} << 20;

    /// A few cores are left to the threads that wait for the bytes, and to the driver.
    static int default_readers() noexcept {
        const unsigned cores = usable_cores();
        return static_cast<int>(std::clamp(cores - cores / 4, 2u, 12u));
    }

    Chunking chunking_;
    std::uint64_t slot_bytes_;
    std::uint32_t slots_;
    int readers_;
    std::shared_ptr<engine> engine_;
};

namespace detail {

template <class... Ps>
struct make_weight_stream {
    PENSTOCK_CHECK_POLICIES("weight_stream", Ps...);
    static_assert(axis_count<axis::eviction, Ps...> == 0, "penstock: weight_stream keeps nothing, so it takes no eviction rule");
    using type = basic_weight_stream<
        pick_policy<axis::memory, memory::pinned, Ps...>, pick_policy<axis::chunking, chunking::suited<bytes{16u << 20}>, Ps...>,
        pick_policy<axis::prefetch, prefetch::budget<bytes{64u << 20}>, Ps...>, pick_policy<axis::scheduling, scheduler::fifo, Ps...>>;
};

}  // namespace detail

/// A weight stream from policies in any order. Defaults: pinned staging, chunks of 16 MiB, of 1 MiB from a disk, 64 MiB of them ahead, first
/// come first served. From the page cache smaller chunks leave gaps on the link, and a larger ring is slower, since it leaves the last cache
/// before it is copied.
template <class... Ps>
using weight_stream = typename detail::make_weight_stream<Ps...>::type;

}  // namespace penstock::inline v0_1
