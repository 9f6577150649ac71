// Helper threads for work of ten microseconds and more, which is less than the time to start or wake a thread.
//
// Work consists of parts that can be done in any order. The caller offers them, processes parts itself, and waits only
// for those that a helper has started, so a helper that is late, or never comes, is not waited for. A helper without
// work looks for more for a while before it sleeps: consecutive reads find it awake, and one after a pause costs some
// microseconds to wake it. Helpers are shared by all callers and live as long as the process; while one caller uses
// them, another works alone. A forked child has none of its parent's threads and starts its own.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

namespace mdata {

class Helpers {
public:
    static constexpr std::size_t kMost = 63;

    // Those of the process.
    static Helpers& shared() {
        static std::atomic<Helpers*> kept{nullptr};
        Helpers* found = kept.load();
        if (found != nullptr) return *found;
        auto made = std::make_unique<Helpers>();
        ::pthread_atfork(nullptr, nullptr, [] { kept.store(nullptr); });
        // Never destroyed: its threads sleep in it until the process ends.
        return kept.compare_exchange_strong(found, made.get()) ? *made.release() : *found;
    }

    // work(part) for each part below `parts`, by this thread and at most so many others. Work must not throw.
    template <typename Work>
    void share(std::size_t parts, std::size_t helpers, const Work& work) {
        static_assert(noexcept(work(std::size_t{0})));
        const bool alone = helpers == 0 || parts < 2 || parts > kMostParts || owned_.test_and_set(std::memory_order_acquire);
        if (alone) {
            for (std::size_t part = 0; part < parts; ++part) work(part);
            return;
        }
        start(std::min(helpers, kMost));
        work_ = &work;
        call_ = [](const void* what, std::size_t part) { (*static_cast<const Work*>(what))(part); };
        wanted_.store(helpers, std::memory_order_relaxed);
        unfinished_.store(static_cast<std::uint32_t>(parts), std::memory_order_relaxed);
        // Sequentially consistent: otherwise the look for sleepers may come before it, and one falls asleep unseen.
        open_.store(static_cast<std::uint32_t>(parts) << kLast);
        open_.notify_all();
        while (take<Side::first>()) continue;
        if (!comes_true([this] { return unfinished_.load(std::memory_order_acquire) == 0; })) {
            for (std::uint32_t left = unfinished_.load(); left != 0; left = unfinished_.load()) unfinished_.wait(left);
        }
        owned_.clear(std::memory_order_release);
    }

private:
    // As long as a sleeping thread takes to be awake.
    static constexpr std::chrono::microseconds kLook{50};
    static constexpr int kLooksBetweenClocks = 64;
    static constexpr int kLast = 16;  // its bit
    static constexpr std::uint32_t kMostParts = 0xffff;
    enum class Side { first, last };

    void start(std::size_t helpers) {
        try {
            for (; started_ < helpers; ++started_) {
                std::thread([this, number = started_] { help(number); }).detach();
            }
        } catch (const std::system_error&) {  // no more threads are to be had: fewer help
        }
    }

    [[noreturn]] void help(std::size_t number) {
        for (;;) {
            if (number < wanted_.load(std::memory_order_relaxed) && take<Side::last>()) continue;
            if (comes_true([this] { return is_open(open_.load(std::memory_order_relaxed)); })) continue;
            const std::uint32_t none = open_.load();
            if (!is_open(none)) open_.wait(none);
        }
    }

    // Does one part, if there is one. The caller takes the first and helpers the last: where one buffer is filled again
    // and again, its beginning and its end each stay in one core's cache.
    template <Side side>
    bool take() {
        std::uint32_t open = open_.load(std::memory_order_relaxed);
        do {
            if (!is_open(open)) return false;
        } while (!open_.compare_exchange_weak(open, side == Side::first ? open + 1 : open - (1u << kLast)));
        // What it calls stays until all parts are finished.
        call_(work_, side == Side::first ? open & kMostParts : (open >> kLast) - 1);
        if (unfinished_.fetch_sub(1) == 1) unfinished_.notify_all();
        return true;
    }

    static bool is_open(std::uint32_t open) { return (open & kMostParts) < (open >> kLast); }

    // Whether it does in a little while.
    template <typename True>
    static bool comes_true(const True& is_true) {
        const auto end = std::chrono::steady_clock::now() + kLook;
        do {
            for (int i = 0; i < kLooksBetweenClocks; ++i) {
                if (is_true()) return true;
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }

    std::atomic_flag owned_;
    std::size_t started_ = 0;
    const void* work_ = nullptr;
    void (*call_)(const void*, std::size_t) = nullptr;
    std::atomic<std::size_t> wanted_{0};
    // Each alone in a line of the cache. Parts [first, last) that nobody has taken, as last << kLast | first.
    alignas(64) std::atomic<std::uint32_t> open_{0};
    alignas(64) std::atomic<std::uint32_t> unfinished_{0};
};

}  // namespace mdata
