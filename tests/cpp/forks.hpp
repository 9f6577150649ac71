// Children forked while a thread of their parent works: what a lock that is held at that moment would stop.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace check {

// AddressSanitizer's own allocator has locks that fork does not take (of GCC 12; a child hung there in 11 of 240 runs).
// Who is built with it forks no children; glibc's allocator, which the plain build has, forks well.
#ifdef __has_feature  // Clang's way to say what GCC says by a macro
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kForks = false;
#else
inline constexpr bool kForks = true;
#endif

// Whether `is_right()` holds in each child, and none waits for ever; a thread here calls `work()` all the while.
template <typename Work, typename Right>
bool in_children(int rounds, const Work& work, const Right& is_right) {
    std::atomic<bool> done = false;
    std::jthread worker([&] { while (!done) work(); });
    bool all = true;
    for (int round = 0; round < rounds && all; ++round) {
        if (!kForks) {
            all = is_right();
            continue;
        }
        const pid_t child = ::fork();
        if (child == 0) {
            ::alarm(20);
            ::_exit(is_right() ? 0 : 1);
        }
        int status = 1;
        all = ::waitpid(child, &status, 0) == child && status == 0;
    }
    done = true;
    return all;
}

}  // namespace check
