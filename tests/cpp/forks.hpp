// Children forked while a thread of their parent works: what a lock that is held at that moment would stop.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace check {

// Whether `is_right()` holds in each child, and none waits for ever; a thread here calls `work()` all the while.
template <typename Work, typename Right>
bool in_children(int rounds, const Work& work, const Right& is_right) {
    std::atomic<bool> done = false;
    std::jthread worker([&] { while (!done) work(); });
    bool all = true;
    for (int round = 0; round < rounds && all; ++round) {
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
