// From a word to ids: the longest entry that begins a run of bytes (Trie), an entry that is a whole short word
// (ShortWords, a single lookup for most words of prose), and cached results of other words (Memo). Only a Memo changes
// after it was built; its size is fixed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace mdata::wordpiece {

struct Item {
    std::string_view text;
    std::int32_t value;
};

// Children of a node lie side by side, ordered by their byte.
class Trie {
public:
    struct Match {
        std::size_t size = 0;  // 0: none
        std::int32_t value = 0;
    };

    // Of items with the same text the last counts; one without text is left out.
    explicit Trie(std::span<const Item> items) : nodes_(1), roots_(256, 0) {
        std::vector<Item> sorted(items.begin(), items.end());
        std::erase_if(sorted, [](const Item& item) { return item.text.empty(); });
        std::stable_sort(sorted.begin(), sorted.end(), [](const Item& a, const Item& b) { return a.text < b.text; });
        grow(sorted);
        const Node& root = nodes_[0];
        for (std::uint32_t child = root.first; child < root.first + root.count; ++child) roots_[nodes_[child].label] = child;
    }

    Match longest(const char* data, std::size_t size) const {
        Match best;
        if (size == 0) return best;
        std::uint32_t node = roots_[byte(data[0])];
        for (std::size_t at = 1; node != 0; ++at) {
            if (nodes_[node].ends) best = {at, nodes_[node].value};
            if (at == size) break;
            node = child(nodes_[node], byte(data[at]));
        }
        return best;
    }

private:
    struct Node {
        std::uint32_t first = 0;
        std::int32_t value = 0;
        std::uint16_t count = 0;
        std::uint8_t label = 0;
        bool ends = false;
    };
    static_assert(sizeof(Node) == 12);
    // Items begin..end share their first `depth` bytes, which are `node`.
    struct Task {
        std::size_t begin, end, depth;
        std::uint32_t node;
    };

    static std::uint8_t byte(char c) { return static_cast<std::uint8_t>(c); }

    void grow(const std::vector<Item>& sorted) {
        std::vector<Task> tasks{{0, sorted.size(), 0, 0}};
        for (std::size_t next = 0; next < tasks.size(); ++next) {
            auto [begin, end, depth, node] = tasks[next];
            for (; begin < end && sorted[begin].text.size() == depth; ++begin) {
                nodes_[node].ends = true;
                nodes_[node].value = sorted[begin].value;
            }
            if (nodes_.size() > (std::size_t{1} << 31)) throw std::overflow_error("a vocabulary of 2^31 bytes");
            nodes_[node].first = static_cast<std::uint32_t>(nodes_.size());
            while (begin < end) {
                const std::uint8_t label = byte(sorted[begin].text[depth]);
                const std::size_t start = begin;
                while (begin < end && byte(sorted[begin].text[depth]) == label) ++begin;
                tasks.push_back({start, begin, depth + 1, static_cast<std::uint32_t>(nodes_.size())});
                nodes_.emplace_back().label = label;
                ++nodes_[node].count;
            }
        }
    }

    std::uint32_t child(const Node& node, std::uint8_t label) const {
        std::uint32_t low = node.first, size = node.count;
        if (size == 0) return 0;
        for (; size > 1; size -= size / 2)
            if (nodes_[low + size / 2].label <= label) low += size / 2;
        return nodes_[low].label == label ? low : 0;
    }

    std::vector<Node> nodes_;
    std::vector<std::uint32_t> roots_;
};

// Appends the ids of a text from its beginning, each time the longest entry. Every byte must be an entry.
inline void append_longest(const Trie& trie, std::string_view text, std::vector<std::int32_t>& ids) {
    for (std::size_t at = 0; at < text.size();) {
        const Trie::Match match = trie.longest(text.data() + at, text.size() - at);
        if (match.size == 0) throw std::logic_error("a byte without an entry");
        ids.push_back(match.value);
        at += match.size;
    }
}

// The first `bytes` of 8 bytes that can be read, as a number.
inline std::uint64_t first_bytes(const char* data, std::size_t bytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
    return bytes >= 8 ? word : word & ((std::uint64_t{1} << (8 * bytes)) - 1);
}

// Bits of a key spread over 64, the upper ones best.
inline std::uint64_t mix(std::uint64_t key) {
    key *= 0x9E3779B97F4A7C15ULL;
    key ^= key >> 32;
    return key * 0x9E3779B97F4A7C15ULL;
}

// Words of 1 to 16 bytes in an open hash table; a word's bytes are two numbers.
class ShortWords {
public:
    static constexpr std::size_t kMostBytes = 16;
    static constexpr std::int32_t kNone = -1;

    // Values are not negative. Of items with the same text the last counts.
    explicit ShortWords(std::span<const Item> items) {
        const auto fits = [](const Item& item) { return !item.text.empty() && item.text.size() <= kMostBytes; };
        const auto count = static_cast<std::size_t>(std::count_if(items.begin(), items.end(), fits));
        slots_.resize(std::bit_ceil(2 * count + 2));
        shift_ = 64 - std::countr_zero(slots_.size());
        for (const Item& item : items) {
            if (!fits(item)) continue;
            char padded[kMostBytes] = {};
            std::memcpy(padded, item.text.data(), item.text.size());
            const Key key = key_of(padded, item.text.size());
            std::size_t at = place(key);
            while (slots_[at].value != kNone && !same(slots_[at], key)) at = (at + 1) & (slots_.size() - 1);
            slots_[at] = {key.low, key.high, key.size, item.value};
        }
    }

    // `data` must have kMostBytes bytes that can be read; `size` of them, 1 to kMostBytes, are the word.
    std::int32_t find(const char* data, std::size_t size) const {
        const Key key = key_of(data, size);
        std::size_t at = place(key);
        while (slots_[at].value != kNone && !same(slots_[at], key)) at = (at + 1) & (slots_.size() - 1);
        return slots_[at].value;
    }

private:
    // The size tells words apart that end in bytes of 0.
    struct Key {
        std::uint64_t low = 0, high = 0;
        std::uint32_t size = 0;
    };
    struct Slot {
        std::uint64_t low = 0, high = 0;
        std::uint32_t size = 0;
        std::int32_t value = kNone;
    };

    static bool same(const Slot& slot, const Key& key) {
        return slot.low == key.low && slot.high == key.high && slot.size == key.size;
    }

    static Key key_of(const char* data, std::size_t size) {
        const std::uint64_t high = size > 8 ? first_bytes(data + 8, size - 8) : 0;
        return {first_bytes(data, size), high, static_cast<std::uint32_t>(size)};
    }

    std::size_t place(const Key& key) const {
        return static_cast<std::size_t>(mix(key.low ^ (key.high * 0xC2B2AE3D27D4EB4FULL)) >> shift_);
    }

    std::vector<Slot> slots_;
    int shift_ = 0;
};

// The ids of words of up to kMostBytes bytes that were met before; a new word takes the place of an older one.
class Memo {
public:
    static constexpr std::size_t kMostBytes = 32;
    static constexpr std::size_t kMostIds = 7;

    Memo() : slots_(kSlots) {}

    // The slot of a word of 1 to kMostBytes bytes (kMostBytes of `data` can be read): found, or to be filled by `put`.
    class Place;
    Place find(const char* data, std::size_t size);

private:
    static constexpr std::size_t kSlots = 8192;
    // A line of the processor's cache.
    struct alignas(64) Slot {
        std::uint64_t key[4] = {};
        std::int32_t ids[kMostIds] = {};
        std::uint16_t size = 0;
        std::uint16_t count = 0;
    };
    static_assert(sizeof(Slot) == 64);

    std::vector<Slot> slots_;
};

class Memo::Place {
public:
    Place(Slot& slot, const std::uint64_t (&key)[4], std::size_t size)
        : slot_(slot), size_(static_cast<std::uint16_t>(size)) {
        std::copy(std::begin(key), std::end(key), key_);
        known_ = slot.size == size_ && std::equal(std::begin(key), std::end(key), slot.key);
    }

    bool known() const { return known_; }
    std::span<const std::int32_t> ids() const { return {slot_.ids, slot_.count}; }
    void put(std::span<const std::int32_t> ids) {
        if (ids.size() > kMostIds) return;
        std::copy(std::begin(key_), std::end(key_), slot_.key);
        std::copy(ids.begin(), ids.end(), slot_.ids);
        slot_.size = size_;
        slot_.count = static_cast<std::uint16_t>(ids.size());
    }

private:
    Slot& slot_;
    std::uint64_t key_[4];
    std::uint16_t size_;
    bool known_;
};

inline Memo::Place Memo::find(const char* data, std::size_t size) {
    std::uint64_t key[4] = {};
    std::uint64_t mixed = 0;
    for (std::size_t part = 0; 8 * part < size; ++part) {
        key[part] = first_bytes(data + 8 * part, size - 8 * part);
        mixed = mix(mixed ^ key[part]);
    }
    return Place(slots_[mixed >> (64 - std::countr_zero(kSlots))], key, size);
}

}  // namespace mdata::wordpiece
