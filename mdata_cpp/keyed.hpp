// A stream of words for each number under one key: word i = f(key, number, i), by Philox (philox.hpp).
//
// Unlike a Mersenne Twister it costs nothing to start, so every sample or document can have its own. Of the key's 128
// bits 96 are used: 64 are Philox's key, 32 are in its counter beside the number and the block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "draws.hpp"
#include "permutation.hpp"
#include "philox.hpp"

namespace mdata {

class KeyedStream : public Draws<KeyedStream> {
public:
    KeyedStream(Key128 key, std::uint64_t number) : key_(key), number_(number) {}

    std::uint32_t next() {
        if (at_ == block_.size()) refill();
        return block_[at_++];
    }

private:
    void refill() {
        block_ = philox4x32({blocks_++, static_cast<std::uint32_t>(number_), static_cast<std::uint32_t>(number_ >> 32U),
                             static_cast<std::uint32_t>(key_.high)},
                            {static_cast<std::uint32_t>(key_.low), static_cast<std::uint32_t>(key_.low >> 32U)});
        at_ = 0;
    }

    Key128 key_;
    std::uint64_t number_;
    std::uint32_t blocks_ = 0;
    Counter block_{};
    std::size_t at_ = 4;
};

}  // namespace mdata
