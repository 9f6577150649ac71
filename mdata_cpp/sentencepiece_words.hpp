// A cache of encoded words with their ids, in bounded memory.
//
// A word is stored in one of the four slots that its hash selects; if all are taken, one is replaced. Words of up to 15
// bytes with up to 3 ids are stored in the table itself, others beside it; when that part is full the whole cache is
// cleared.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <vector>

#include "sentencepiece_merges.hpp"

namespace mdata::sp {

class Words {
   public:
    // A text that words are looked up in must be followed by this many bytes that can be read.
    static constexpr std::size_t kPadding = 16;
    static constexpr std::size_t kLongest = 240;
    // `find` may write so many ids more than there are.
    static constexpr std::size_t kSpare = 3;

    struct Key {
        std::uint64_t low, high;
        std::uint64_t hash;
    };

    // 2^bucket_bits buckets, and so many bytes beside the table. Memory is taken as words come.
    explicit Words(int bucket_bits = 16, std::size_t most_beside = std::size_t{16} << 20)
        : shift_(64 - bucket_bits), most_beside_(most_beside), count_((std::size_t{1} << bucket_bits) * kWays) {
        forget();
    }

    // `word` has 1 to kLongest bytes and kPadding more behind it.
    static Key key_of(std::string_view word) {
        Key key{};
        if (word.size() <= kInline) {
            std::memcpy(&key.low, word.data(), 8);
            std::memcpy(&key.high, word.data() + 8, 8);
            if (word.size() < 8) {
                key.low &= (std::uint64_t{1} << 8 * word.size()) - 1;
                key.high = 0;
            } else {
                key.high &= (std::uint64_t{1} << 8 * (word.size() - 8)) - 1;
            }
            key.high |= std::uint64_t{word.size()} << 56;
            key.hash = mixed(key.low, key.high);
            return key;
        }
        std::uint64_t hash = word.size();
        std::size_t at = 0;
        for (; at + 8 <= word.size(); at += 8) {
            std::uint64_t part = 0;
            std::memcpy(&part, word.data() + at, 8);
            hash = mixed(hash, part);
        }
        std::uint64_t rest = 0;
        std::memcpy(&rest, word.data() + at, word.size() - at);
        key.hash = mixed(hash, rest);
        key.low = key.hash;
        key.high = kOutside | word.size();
        return key;
    }

    void prefetch(const Key& key) const {
        const Entry* bucket = entries_.get() + (key.hash >> shift_) * kWays;
        __builtin_prefetch(bucket);
        __builtin_prefetch(bucket + 2);
    }

    // Write the ids of a word to `out`, with room for them and kSpare more; how many, 0: the word is not known.
    std::size_t find(const Key& key, std::string_view word, std::int32_t* out) const {
        const Entry* bucket = entries_.get() + (key.hash >> shift_) * kWays;
        for (std::size_t way = 0; way < kWays; ++way) {
            const Entry& entry = bucket[way];
            if (entry.low != key.low || entry.high != key.high) continue;
            if (word.size() > kInline && std::memcmp(&beside_[entry.place()], word.data(), word.size()) != 0) continue;
            if (entry.count <= entry.ids.size() && word.size() <= kInline) {
                std::memcpy(out, entry.ids.data(), sizeof entry.ids);
            } else {
                std::memcpy(out, &beside_[entry.place() + beside_of(word)], 4 * entry.count);
            }
            return entry.count;
        }
        return 0;
    }

    void insert(const Key& key, std::string_view word, std::span<const std::int32_t> ids) {
        Entry entry{key.low, key.high, static_cast<std::uint32_t>(ids.size()), {}};
        if (ids.size() <= entry.ids.size() && word.size() <= kInline) {
            std::copy(ids.begin(), ids.end(), entry.ids.begin());
        } else {
            const std::size_t need = beside_of(word) + 4 * ids.size();
            if (beside_.size() + need > most_beside_) forget();
            entry.ids[0] = static_cast<std::int32_t>(beside_.size());
            const std::size_t start = beside_.size();
            beside_.resize(start + need);
            if (word.size() > kInline) std::memcpy(&beside_[start], word.data(), word.size());
            std::memcpy(&beside_[start + beside_of(word)], ids.data(), 4 * ids.size());
        }
        Entry* bucket = entries_.get() + (key.hash >> shift_) * kWays;
        std::size_t way = 0;
        while (way < kWays && bucket[way].high != 0) ++way;
        if (way == kWays) way = turn_++ % kWays;
        bucket[way] = entry;
    }

   private:
    static constexpr std::size_t kInline = 15, kWays = 4;
    static constexpr std::uint64_t kOutside = std::uint64_t{0xFF} << 56;

    // All zeros: empty.
    struct Entry {
        std::uint64_t low, high;
        std::uint32_t count;
        std::array<std::int32_t, 3> ids;
        std::size_t place() const { return static_cast<std::size_t>(ids[0]); }
    };

    // How many bytes of a word stand before its ids in the part beside the table.
    static std::size_t beside_of(std::string_view word) { return word.size() <= kInline ? 0 : word.size(); }

    struct Free {
        void operator()(Entry* entries) const { std::free(entries); }
    };

    void forget() {
        // Fresh zeros cost nothing until they are used.
        entries_.reset();
        entries_.reset(static_cast<Entry*>(std::calloc(count_, sizeof(Entry))));
        if (entries_ == nullptr) throw std::bad_alloc();
        beside_.clear();
    }

    int shift_;
    std::size_t most_beside_, count_;
    std::unique_ptr<Entry[], Free> entries_;
    std::vector<char> beside_;
    std::size_t turn_ = 0;
};

}  // namespace mdata::sp
