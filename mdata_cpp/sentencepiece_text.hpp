// How a SentencePiece model prepares a text: normalization rules, blanks, and pieces that are matched in the raw text.
//
// The prepared text writes a blank as one byte, ' ', where the library writes U+2581: both the blanks of the text and
// any U+2581 in it become that, because they become the same in the library. Everything is safe for any bytes; for
// valid UTF-8 the result is the library's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mdata::sp {

inline constexpr std::string_view kBlank = "\xe2\x96\x81";

// Bytes of the character that begins with this byte.
inline std::size_t char_length(char first) {
    static constexpr std::array<std::uint8_t, 16> kLengths = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
    return kLengths[static_cast<unsigned char>(first) >> 4];
}

// The character at the beginning of a text that is not empty, as one number, and how many bytes it takes. A character
// of one byte is that byte; for others the bytes side by side serve as well as the code point.
inline std::uint32_t first_char(std::string_view text, std::size_t& size) {
    const auto byte = static_cast<unsigned char>(text[0]);
    if (byte < 0x80) {
        size = 1;
        return byte;
    }
    size = std::min(char_length(text[0]), text.size());
    const auto next = [&](std::size_t at) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[at])); };
    if (size == 3) return std::uint32_t{byte} << 16 | next(1) << 8 | next(2);
    if (size == 2) return std::uint32_t{byte} << 8 | next(1);
    return size == 4 ? std::uint32_t{byte} << 24 | next(1) << 16 | next(2) << 8 | next(3) : byte;
}

// Replace U+2581 by ' ' in place.
inline void fold_blanks(std::string& text) {
    std::size_t at = text.find(kBlank);
    if (at == std::string::npos) return;
    std::size_t out = at;
    while (at < text.size()) {
        if (std::string_view(text).substr(at, kBlank.size()) == kBlank) {
            text[out++] = ' ';
            at += kBlank.size();
        } else {
            text[out++] = text[at++];
        }
    }
    text.resize(out);
}

// A set of texts with a number each, and a walk through them byte by byte.
class Trie {
   public:
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;

    struct Entry {
        std::string text;  // not empty
        std::int32_t value;
    };

    Trie() : nodes_(1) {}

    // Entries are sorted here; of equal texts the last counts.
    explicit Trie(std::vector<Entry> entries) : nodes_(1) {
        std::stable_sort(entries.begin(), entries.end(),
                         [](const Entry& a, const Entry& b) { return a.text < b.text; });
        struct Span {
            std::size_t begin, end, depth;
            std::uint32_t node;
        };
        std::vector<Span> open = {{0, entries.size(), 0, 0}};
        for (std::size_t next = 0; next < open.size(); ++next) {
            Span span = open[next];
            while (span.begin < span.end && entries[span.begin].text.size() == span.depth)
                nodes_[span.node].value = entries[span.begin++].value;
            nodes_[span.node].first = static_cast<std::uint32_t>(nodes_.size());
            while (span.begin < span.end) {
                const char label = entries[span.begin].text[span.depth];
                std::size_t stop = span.begin;
                while (stop < span.end && entries[stop].text[span.depth] == label) ++stop;
                open.push_back({span.begin, stop, span.depth + 1, static_cast<std::uint32_t>(nodes_.size())});
                nodes_.push_back({});
                labels_.resize(nodes_.size());
                labels_.back() = label;
                ++nodes_[span.node].count;
                span.begin = stop;
            }
        }
        labels_.resize(nodes_.size());
        for (std::uint32_t child = nodes_[0].first; child < nodes_[0].first + nodes_[0].count; ++child)
            roots_[static_cast<unsigned char>(labels_[child])] = child;
    }

    bool empty() const { return nodes_[0].count == 0; }
    bool begins(char first) const { return roots_[static_cast<unsigned char>(first)] != 0; }

    // The node one byte further, from 0 at the beginning; kNone if no text goes on so.
    std::uint32_t next(std::uint32_t node, char byte) const {
        if (node == 0) {
            const std::uint32_t child = roots_[static_cast<unsigned char>(byte)];
            return child == 0 ? kNone : child;
        }
        const Node& from = nodes_[node];
        if (from.count == 0) return kNone;
        const void* found = std::memchr(labels_.data() + from.first, byte, from.count);
        return found == nullptr ? kNone : static_cast<std::uint32_t>(static_cast<const char*>(found) - labels_.data());
    }

    // The number of the text that ends at a node; -1: none does.
    std::int32_t value(std::uint32_t node) const { return nodes_[node].value; }

    // Bytes of the longest text of the set that `text` begins with, and its number; 0: none.
    std::size_t longest(std::string_view text, std::int32_t& value) const {
        std::size_t length = 0;
        std::uint32_t node = 0;
        for (std::size_t at = 0; at < text.size(); ++at) {
            node = next(node, text[at]);
            if (node == kNone) break;
            if (nodes_[node].value >= 0) {
                length = at + 1;
                value = nodes_[node].value;
            }
        }
        return length;
    }

   private:
    struct Node {
        std::uint32_t first = 0;
        std::uint32_t count = 0;
        std::int32_t value = -1;
    };
    std::vector<Node> nodes_;
    std::vector<char> labels_;
    std::array<std::uint32_t, 256> roots_{};
};

// Compiled rules of normalization: a double-array trie of what is replaced, and the replacements.
//
// The bytes: uint32 size of the trie in bytes, the trie (units of uint32), the replacements, each ended by NUL; little
// endian. A unit: bits 0-7 label, bit 8 "has a leaf", bit 9 "offset is shifted by 8", bits 10-30 offset, bit 31 leaf;
// a leaf's bits 0-30 are its value, the place of a replacement.
class Charsmap {
   public:
    Charsmap() = default;

    explicit Charsmap(std::string_view data) {
        if (data.empty()) return;
        std::uint32_t trie_bytes = 0;
        if (data.size() > sizeof trie_bytes) std::memcpy(&trie_bytes, data.data(), sizeof trie_bytes);
        data.remove_prefix(std::min(data.size(), sizeof trie_bytes));
        if (trie_bytes < 4 || trie_bytes % 4 != 0 || trie_bytes >= data.size())
            throw std::invalid_argument("the rules of normalization are damaged");
        units_.resize(trie_bytes / 4);
        std::memcpy(units_.data(), data.data(), trie_bytes);
        texts_ = data.substr(trie_bytes);
        texts_.push_back('\0');
    }

    bool empty() const { return units_.empty(); }

    // Bytes of the longest rule that `text` begins with, and what replaces them; 0: none.
    std::size_t longest(std::string_view text, std::string_view& replacement) const {
        std::size_t length = 0;
        if (units_.empty()) return length;
        std::size_t place = offset(units_[0]);
        for (std::size_t at = 0, found = 0; at < text.size() && found < kMostRules; ++at) {
            const std::uint32_t byte = static_cast<unsigned char>(text[at]);
            place ^= byte;
            if (place >= units_.size() || (units_[place] & kLabel) != byte) break;
            const std::uint32_t unit = units_[place];
            place ^= offset(unit);
            if (unit >> 8 & 1) {
                if (place >= units_.size()) break;
                const std::size_t start = units_[place] & ~kLeaf;
                if (start >= texts_.size()) break;
                length = at + 1;
                replacement = std::string_view(texts_.data() + start);
                ++found;
            }
        }
        return length;
    }

    // Whether a character of one byte stays as it is, whatever ASCII character comes after it.
    bool keeps(char character) const {
        if (units_.empty()) return true;
        std::string text(1, character);
        std::string_view replacement;
        if (longest(text, replacement) != 0) return false;
        const std::size_t place = offset(units_[0]) ^ static_cast<unsigned char>(character);
        if (place >= units_.size() || (units_[place] & kLabel) != static_cast<unsigned char>(character)) return true;
        const std::size_t children = place ^ offset(units_[place]);
        for (std::uint32_t byte = 0; byte < 0x80; ++byte) {
            const std::size_t child = children ^ byte;
            if (child < units_.size() && (units_[child] & kLabel) == byte) return false;
        }
        return true;
    }

   private:
    // The library looks no further.
    static constexpr std::size_t kMostRules = 32;
    static constexpr std::uint32_t kLeaf = 1U << 31;
    static constexpr std::uint32_t kLabel = kLeaf | 0xFF;

    static std::size_t offset(std::uint32_t unit) {
        return static_cast<std::size_t>(unit >> 10 & 0x1FFFFF) << ((unit & 1U << 9) >> 6);
    }

    std::vector<std::uint32_t> units_;
    std::string texts_;
};

struct TextRules {
    std::string charsmap;
    std::vector<std::string> raw;  // texts that are matched before any rule: the pieces that are defined for users
    bool dummy_prefix = true;
    bool remove_extra_blanks = true;
    bool blank_as_suffix = false;
};

class Preparer {
   public:
    explicit Preparer(const TextRules& rules) : rules_(rules), charsmap_(rules.charsmap), raw_(entries(rules.raw)) {
        for (int byte = 0; byte < 0x80; ++byte) {
            const char character = static_cast<char>(byte);
            simple_[static_cast<std::size_t>(byte)] = charsmap_.keeps(character) && !raw_.begins(character);
        }
        copies_ = charsmap_.empty() && !rules.remove_extra_blanks && raw_.empty();
    }

    // Write the prepared form of `text` into `out`.
    void prepare(std::string_view text, std::string& out) const {
        out.clear();
        if (text.empty()) return;
        const bool removes = rules_.remove_extra_blanks;
        if (removes) {
            while (!text.empty()) {
                std::string_view replacement;
                const std::size_t size = step(text, replacement);
                if (replacement != " ") break;
                text.remove_prefix(size);
            }
            if (text.empty()) return;
        }
        if (rules_.dummy_prefix && !rules_.blank_as_suffix) out.push_back(' ');
        if (copies_) {
            out.append(text);
        } else {
            replace(text, out);
        }
        fold_blanks(out);
        if (removes) out.resize(out.find_last_not_of(' ') + 1);
        if (rules_.dummy_prefix && rules_.blank_as_suffix) out.push_back(' ');
    }

   private:
    static std::vector<Trie::Entry> entries(const std::vector<std::string>& texts) {
        std::vector<Trie::Entry> entries;
        for (const std::string& text : texts) entries.push_back({text, 0});
        return entries;
    }

    // The bytes that one step takes from a text that is not empty, and what they become.
    std::size_t step(std::string_view text, std::string_view& replacement) const {
        std::int32_t ignored = 0;
        if (raw_.begins(text[0])) {
            if (const std::size_t size = raw_.longest(text, ignored); size != 0) {
                replacement = text.substr(0, size);
                return size;
            }
        }
        if (const std::size_t size = charsmap_.longest(text, replacement); size != 0) return size;
        const std::size_t size = std::min(char_length(text[0]), text.size());
        replacement = text.substr(0, size);
        return size;
    }

    bool is_simple(std::string_view text, std::size_t at) const {
        const auto byte = static_cast<unsigned char>(text[at]);
        return byte < 0x80 && simple_[byte] && (at + 1 == text.size() || static_cast<signed char>(text[at + 1]) >= 0);
    }

    void replace(std::string_view text, std::string& out) const {
        const bool removes = rules_.remove_extra_blanks;
        bool after_blank = removes;
        while (!text.empty()) {
            std::size_t run = 0;
            for (; run < text.size() && is_simple(text, run); ++run) {
                if (removes && text[run] == ' ') {
                    if (after_blank) break;
                    after_blank = true;
                } else {
                    after_blank = false;
                }
            }
            out.append(text.substr(0, run));
            text.remove_prefix(run);
            if (text.empty()) break;
            std::string_view replacement;
            const std::size_t size = step(text, replacement);
            while (after_blank && replacement.starts_with(' ')) replacement.remove_prefix(1);
            if (!replacement.empty()) {
                out.append(replacement);
                after_blank = removes && replacement.ends_with(' ');
            }
            text.remove_prefix(size);
        }
    }

    TextRules rules_;
    Charsmap charsmap_;
    Trie raw_;
    std::array<bool, 0x80> simple_{};
    bool copies_ = false;
};

}  // namespace mdata::sp
