// A lock that fork takes, so that a child finds it free whatever the threads of its parent did. There is one for each
// `Whose`, shared by all of its objects; it is held for a few instructions only, because callers and fork wait for it.
#pragma once

#include <pthread.h>

#include <mutex>

namespace mdata {

template <typename Whose>
std::mutex& fork_lock() {
    static std::mutex mutex;
    [[maybe_unused]] static const int registered = ::pthread_atfork(
        [] { fork_lock<Whose>().lock(); }, [] { fork_lock<Whose>().unlock(); }, [] { fork_lock<Whose>().unlock(); });
    return mutex;
}

}  // namespace mdata
