#pragma once

/// This process as the system sees it, and fresh ones of the same program.

#include <penstock/error.hpp>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <malloc.h>
#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace load_benchmark {

namespace ps = penstock;

/// Anonymous memory of this process that is resident now, in bytes.
inline std::uint64_t anonymous_bytes() {
    std::ifstream status("/proc/self/status");
    std::uint64_t kib = 0;
    for (std::string key; status >> key;) {
        if (key == "RssAnon:" && status >> kib) {
            break;
        }
        status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    }
    return kib * 1024;
}

/// The most by which `work` lets the anonymous memory grow, looked at every 2 ms.
template <class Work>
std::uint64_t growth_during(Work&& work) {
    ::malloc_trim(0);  // what earlier work left in the heap would hide what this one takes
    std::atomic<std::uint64_t> most{0};
    std::uint64_t before = 0;
    {
        std::atomic<bool> looking{false};
        const std::jthread sampler([&](const std::stop_token& stop) {
            static_cast<void>(anonymous_bytes());  // its own buffers first
            looking = true;
            while (!stop.stop_requested()) {
                most = std::max<std::uint64_t>(most, anonymous_bytes());
                std::this_thread::sleep_for(std::chrono::milliseconds(2));
            }
        });
        while (!looking) {
            std::this_thread::yield();
        }
        before = anonymous_bytes();
        most = before;
        work();
        most = std::max<std::uint64_t>(most, anonymous_bytes());
    }
    return most - before;
}

/// This thread, and those it starts, run on one core while this lives.
class on_one_core {
public:
    on_one_core() {
        ::sched_getaffinity(0, sizeof before_, &before_);
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(::sched_getcpu(), &one);
        ::sched_setaffinity(0, sizeof one, &one);
    }
    on_one_core(const on_one_core&) = delete;
    ~on_one_core() { ::sched_setaffinity(0, sizeof before_, &before_); }

private:
    cpu_set_t before_;
};

/// Runs this program again with these arguments. @return what it wrote to standard output. @throws io_error unless it exits with 0
inline std::string output_of_self(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "/proc/self/exe");
    std::vector<char*> argv;
    for (std::string& a : arguments) {
        argv.push_back(a.data());
    }
    argv.push_back(nullptr);
    int ends[2];
    if (::pipe(ends) != 0) {
        throw ps::io_error(std::string("a pipe cannot be made: ") + std::strerror(errno));
    }
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    ::posix_spawn_file_actions_addclose(&actions, ends[0]);
    ::posix_spawn_file_actions_addclose(&actions, ends[1]);
    pid_t child = 0;
    const int problem = ::posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    std::string text;
    char part[512];
    for (ssize_t n; problem == 0 && (n = ::read(ends[0], part, sizeof part)) > 0;) {
        text.append(part, static_cast<std::size_t>(n));
    }
    ::close(ends[0]);
    int status = 0;
    if (problem != 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        throw ps::io_error("a fresh process of this program failed: " + (problem != 0 ? std::strerror(problem) : text));
    }
    return text;
}

}  // namespace load_benchmark
