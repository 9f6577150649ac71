// Working memory of calls, such as a cache, that later calls use again: as many as there were calls at the same time.
//
// A call owns what it took, so calls do not wait for each other. In a forked child, what a thread of its parent had
// taken is missing, and nothing waits for it.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fork_lock.hpp"

namespace mdata {

template <typename Thing>
class Spares {
public:
    // One that no call has; made(), a unique_ptr, if there is none.
    template <typename Made>
    std::unique_ptr<Thing> take(const Made& made) {
        {
            const std::lock_guard held(fork_lock<Thing>());
            if (!things_.empty()) {
                std::unique_ptr<Thing> thing = std::move(things_.back());
                things_.pop_back();
                return thing;
            }
        }
        return made();
    }

    void give_back(std::unique_ptr<Thing> thing) {
        const std::lock_guard held(fork_lock<Thing>());
        things_.push_back(std::move(thing));
    }

private:
    std::vector<std::unique_ptr<Thing>> things_;
};

}  // namespace mdata
