// Near-duplicate texts: a normal form of words, MinHash signatures (Broder 1997) of its n-grams, and keys of their bands.
//
// The normal form is the text's words joined by single blanks: lower case, without accents, punctuation and control
// characters; each CJK ideograph is a word. An n-gram of words or characters is then a substring. Its hash is XXH64, and
// the permutations are (a * hash + b mod 2^64) mod (2^61 - 1), those of datatrove, so that signatures of the same words
// are equal to its own; so are those by SHA-1, its other hash. Everything is a pure function of a text, so files do not
// depend on workers or machines.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "utf8.hpp"
#include "wordpiece_characters.hpp"

namespace mdata::minhash {

static_assert(std::endian::native == std::endian::little, "hashes read little-endian words");

inline std::uint64_t word_at(const char* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// XXH64 with seed 0 (Collet, the xxHash specification, version 0.2.0).
inline std::uint64_t xxh64(std::string_view bytes) {
    constexpr std::uint64_t p1 = 0x9E3779B185EBCA87, p2 = 0xC2B2AE3D27D4EB4F, p3 = 0x165667B19E3779F9,
                            p4 = 0x85EBCA77C2B2AE63, p5 = 0x27D4EB2F165667C5;
    const auto round = [](std::uint64_t sum, std::uint64_t word) { return std::rotl(sum + word * p2, 31) * p1; };
    const char *at = bytes.data(), *end = at + bytes.size();
    std::uint64_t hash = p5;
    if (bytes.size() >= 32) {
        std::array<std::uint64_t, 4> sums{p1 + p2, p2, 0, 0 - p1};
        for (; end - at >= 32; at += 32)
            for (std::size_t lane = 0; lane < 4; ++lane) sums[lane] = round(sums[lane], word_at(at + 8 * lane));
        hash = std::rotl(sums[0], 1) + std::rotl(sums[1], 7) + std::rotl(sums[2], 12) + std::rotl(sums[3], 18);
        for (const std::uint64_t sum : sums) hash = (hash ^ round(0, sum)) * p1 + p4;
    }
    hash += bytes.size();
    for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ round(0, word_at(at)), 27) * p1 + p4;
    if (end - at >= 4) {
        std::uint32_t half;
        std::memcpy(&half, at, sizeof half);
        hash = std::rotl(hash ^ half * p1, 23) * p2 + p3;
        at += 4;
    }
    for (; at < end; ++at) hash = std::rotl(hash ^ static_cast<unsigned char>(*at) * p5, 11) * p1;
    hash = (hash ^ hash >> 33) * p2;
    hash = (hash ^ hash >> 29) * p3;
    return hash ^ hash >> 32;
}

// The first `size` bytes of SHA-1 (FIPS 180-4) as a little-endian number.
inline std::uint64_t sha1(std::string_view bytes, std::size_t size) {
    std::array<std::uint32_t, 5> state{0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    std::string tail(bytes.substr(bytes.size() / 64 * 64));
    tail.push_back(static_cast<char>(0x80));
    tail.resize((tail.size() + 8 + 63) / 64 * 64);
    for (std::size_t place = 0; place < 8; ++place)
        tail[tail.size() - 1 - place] = static_cast<char>(std::uint64_t{8} * bytes.size() >> 8 * place);
    const auto block = [&](const char* at) {
        std::array<std::uint32_t, 80> words;
        for (std::size_t word = 0; word < 16; ++word) {
            std::uint32_t value = 0;
            for (std::size_t byte = 0; byte < 4; ++byte)
                value = value << 8 | static_cast<unsigned char>(at[4 * word + byte]);
            words[word] = value;
        }
        for (std::size_t word = 16; word < 80; ++word)
            words[word] = std::rotl(words[word - 3] ^ words[word - 8] ^ words[word - 14] ^ words[word - 16], 1);
        auto [a, b, c, d, e] = state;
        for (std::size_t word = 0; word < 80; ++word) {
            const std::uint32_t mixed = word < 20   ? ((b & c) | (~b & d)) + 0x5A827999
                                        : word < 40 ? (b ^ c ^ d) + 0x6ED9EBA1
                                        : word < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDC
                                                    : (b ^ c ^ d) + 0xCA62C1D6;
            const std::uint32_t next = std::rotl(a, 5) + mixed + e + words[word];
            e = d, d = c, c = std::rotl(b, 30), b = a, a = next;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
    };
    for (std::size_t at = 0; at + 64 <= bytes.size(); at += 64) block(bytes.data() + at);
    for (std::size_t at = 0; at < tail.size(); at += 64) block(tail.data() + at);
    std::uint64_t number = 0;
    for (std::size_t byte = size; byte-- > 0;) number = number << 8 | (state[byte / 4] >> 8 * (3 - byte % 4) & 0xFF);
    return number;
}

// Texts as words, from the tables of BERT's normalizer, which are those of fixed Unicode versions.
class NormalForm {
public:
    NormalForm() : characters_({true, true, true, true}) {
        for (std::uint32_t code = 0; code < 0x80; ++code) {
            const std::uint32_t entry = characters_.entry(code);
            const auto action = wordpiece::Characters::action(entry);
            ascii_[code] = action == wordpiece::Action::keep   ? static_cast<char>(code)
                           : action == wordpiece::Action::swap ? static_cast<char>(wordpiece::Characters::payload(entry))
                           : action == wordpiece::Action::drop ? kDropped
                                                               : ' ';
        }
    }

    // Appends the words, joined by blanks, to `form`, and where each begins in it to `begins`.
    void append(std::string_view text, std::string& form, std::vector<std::size_t>& begins) const {
        const std::size_t start = form.size();
        bool inside = false;
        const auto put = [&](const char* bytes, std::size_t size) {
            if (!inside) {
                if (form.size() != start) form.push_back(' ');
                begins.push_back(form.size() - start);
                inside = true;
            }
            form.append(bytes, size);
        };
        const auto put_code = [&](std::uint32_t code, wordpiece::Kind kind) {
            if (kind == wordpiece::Kind::word || is_ideograph(code)) {
                if (is_ideograph(code)) inside = false;
                char bytes[4];
                put(bytes, write_code(code, bytes));
                if (is_ideograph(code)) inside = false;
            } else {
                inside = false;
            }
        };
        for (std::size_t at = 0; at < text.size();) {
            const auto lead = static_cast<unsigned char>(text[at]);
            if (lead < 0x80) {
                ++at;
                const char become = ascii_[lead];
                if (become == ' ') inside = false;
                else if (become != kDropped) put(&become, 1);
                continue;
            }
            const auto [code, size] = code_at(text, at);
            at += size;
            const std::uint32_t entry = characters_.entry(code);
            switch (wordpiece::Characters::action(entry)) {
                case wordpiece::Action::drop: break;
                case wordpiece::Action::blank: inside = false; break;
                case wordpiece::Action::alone: put_code(code, wordpiece::Kind::alone); break;
                case wordpiece::Action::swap:
                    put_code(wordpiece::Characters::payload(entry), wordpiece::Kind::word);
                    break;
                case wordpiece::Action::list:
                    for (const auto& element : characters_.list(wordpiece::Characters::payload(entry)))
                        put_code(element.code, element.kind);
                    break;
                default: put_code(code, wordpiece::Kind::word);  // kept, a syllable of Hangul, or a rare mark
            }
        }
    }

private:
    static constexpr char kDropped = '\0';

    static bool is_ideograph(std::uint32_t code) { return wordpiece::row_of(wordpiece::kCjk, code) != nullptr; }

    wordpiece::Characters characters_;
    std::array<char, 0x80> ascii_{};
};

inline constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;
inline constexpr std::size_t kLanes = 8;  // permutations that are computed together

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define MDATA_MINHASH_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MDATA_MINHASH_CLONES
#endif

// The smallest of ((a * hash + b) mod kPrime) & mask over all hashes, for kLanes pairs of a and b.
MDATA_MINHASH_CLONES inline void minima_of(const std::uint64_t* hashes, std::size_t count, const std::uint64_t* a,
                                           const std::uint64_t* b, std::uint64_t mask, std::uint64_t* minima) {
    std::uint64_t least[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) least[lane] = kPrime;
    for (std::size_t number = 0; number < count; ++number) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const std::uint64_t wide = a[lane] * hashes[number] + b[lane];
            std::uint64_t value = (wide & kPrime) + (wide >> 61);
            value = (value >= kPrime ? value - kPrime : value) & mask;
            least[lane] = value < least[lane] ? value : least[lane];
        }
    }
    std::copy(least, least + kLanes, minima);
}

// The smallest of -1 and MurmurHash3_x86_32 (Appleby) of all n-grams of bytes, as signed numbers, for each seed: what
// Megatron's find_duplicates.py computes, whose start value of 2^32 - 1 is -1 where hashes are signed.
MDATA_MINHASH_CLONES inline void murmur_minima_of(std::string_view bytes, std::size_t ngram,
                                                  const std::uint64_t* seeds, std::uint64_t* minima) {
    constexpr std::size_t kSeeds = 2 * kLanes;
    std::uint32_t start[kSeeds];
    std::int32_t least[kSeeds];
    for (std::size_t lane = 0; lane < kSeeds; ++lane)
        start[lane] = static_cast<std::uint32_t>(seeds[lane]), least[lane] = -1;
    const auto mixed = [](std::uint32_t block) { return std::rotl(block * 0xCC9E2D51, 15) * 0x1B873593; };
    for (std::size_t first = 0; first + ngram <= bytes.size(); ++first) {
        std::uint32_t hash[kSeeds];
        std::copy(start, start + kSeeds, hash);
        std::size_t at = first;
        for (; at + 4 <= first + ngram; at += 4) {
            std::uint32_t block;
            std::memcpy(&block, bytes.data() + at, sizeof block);
            block = mixed(block);
            for (std::size_t lane = 0; lane < kSeeds; ++lane)
                hash[lane] = std::rotl(hash[lane] ^ block, 13) * 5 + 0xE6546B64;
        }
        std::uint32_t tail = 0;
        for (std::size_t byte = first + ngram; byte-- > at;) tail = tail << 8 | static_cast<unsigned char>(bytes[byte]);
        tail = at < first + ngram ? mixed(tail) : 0;
        for (std::size_t lane = 0; lane < kSeeds; ++lane) {
            std::uint32_t value = hash[lane] ^ tail ^ static_cast<std::uint32_t>(ngram);
            value = (value ^ value >> 16) * 0x85EBCA6B;
            value = (value ^ value >> 13) * 0xC2B2AE35;
            const auto number = static_cast<std::int32_t>(value ^ value >> 16);
            least[lane] = number < least[lane] ? number : least[lane];
        }
    }
    for (std::size_t lane = 0; lane < kSeeds; ++lane) minima[lane] = static_cast<std::uint32_t>(least[lane]);
}

// given: words that the text has between single blanks. raw: bytes of the text; sets are of code points, and the last
// n-gram is missing, as in Megatron's find_duplicates.py.
enum class Unit { words, characters, given, raw };
enum class Hash { xxh64, sha1_64, sha1_32, murmur3 };

// The signatures of texts with one set of permutations.
class Signer {
public:
    // a, b: of each of bands * rows permutations, band by band. ngram: how many units are hashed together.
    Signer(std::span<const std::uint64_t> a, std::span<const std::uint64_t> b, std::size_t rows, std::size_t ngram,
           Unit unit, Hash hash)
        : count_(a.size()),
          rows_(rows),
          ngram_(ngram),
          unit_(unit),
          hash_(hash),
          mask_(hash == Hash::sha1_32 ? 0xFFFFFFFF : ~std::uint64_t{0}),
          a_(a.begin(), a.end()),
          b_(b.begin(), b.end()) {
        if (a.size() != b.size() || rows == 0 || ngram == 0 || a.size() % rows != 0)
            throw std::invalid_argument("bands of equal size, with a and b for each permutation");
        if ((unit == Unit::raw) != (hash == Hash::murmur3))
            throw std::invalid_argument("murmur3 hashes raw bytes, and nothing else does");
        const std::size_t whole = (count_ + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
        a_.resize(whole), b_.resize(whole);
    }

    // Appends the normal form of a text to `form`, and where each of its units begins in it to `begins`.
    void normal_form(const NormalForm& words, std::string_view text, std::string& form,
                     std::vector<std::size_t>& begins) const {
        const std::size_t start = form.size();
        if (unit_ == Unit::given || unit_ == Unit::raw) form += text;
        else words.append(text, form, begins);
        if (unit_ == Unit::words) return;
        begins.clear();
        for (std::size_t at = 0; start + at < form.size(); ++at) {
            const bool is_first = unit_ == Unit::given ? at == 0 || form[start + at - 1] == ' '
                                                       : (static_cast<unsigned char>(form[start + at]) & 0xC0) != 0x80;
            if (is_first) begins.push_back(at);
        }
        // A blank at the end is followed by a word without letters, as one at the start follows one.
        if (unit_ == Unit::given && form.size() > start && form.back() == ' ')
            begins.push_back(form.size() - start);
        if (unit_ == Unit::raw && !begins.empty()) begins.pop_back();
    }

    // The signature of a normal form that has an n-gram, whose hashes are given.
    void signature(std::string_view form, std::span<const std::uint64_t> hashes,
                   std::vector<std::uint64_t>& signature) const {
        if (hash_ != Hash::murmur3) return minima(hashes, signature);
        signature.resize(a_.size());
        for (std::size_t first = 0; first < a_.size(); first += 2 * kLanes)
            murmur_minima_of(form, ngram_, &a_[first], &signature[first]);
        signature.resize(count_);
    }

    std::size_t bands() const { return count_ / rows_; }

    // The signature of hashes of n-grams, of which there is at least one.
    void minima(std::span<const std::uint64_t> hashes, std::vector<std::uint64_t>& signature) const {
        signature.resize(a_.size());
        for (std::size_t first = 0; first < a_.size(); first += kLanes)
            minima_of(hashes.data(), hashes.size(), &a_[first], &b_[first], mask_, &signature[first]);
        signature.resize(count_);
    }

    // The hashes of all n-grams of units that begin at `begins` in `form`; none if there are fewer units.
    void ngram_hashes(std::string_view form, std::span<const std::size_t> begins,
                      std::vector<std::uint64_t>& hashes) const {
        hashes.clear();
        const std::size_t blank = unit_ == Unit::words || unit_ == Unit::given ? 1 : 0;
        for (std::size_t first = 0; first + ngram_ <= begins.size(); ++first) {
            const std::size_t last = first + ngram_;
            const std::size_t end = last == begins.size() ? size_of(form) : begins[last] - blank;
            hashes.push_back(hash_of(form.substr(begins[first], end - begins[first])));
        }
    }

    // The hash of each band of a signature.
    void band_keys(std::span<const std::uint64_t> signature, std::uint64_t* keys) const {
        for (std::size_t band = 0; band < bands(); ++band)
            keys[band] = xxh64({reinterpret_cast<const char*>(&signature[band * rows_]), rows_ * sizeof(std::uint64_t)});
    }

private:
    std::uint64_t hash_of(std::string_view gram) const {
        if (hash_ == Hash::xxh64 || hash_ == Hash::murmur3) return xxh64(gram);
        return sha1(gram, hash_ == Hash::sha1_64 ? 8 : 4);
    }

    // Where the last unit ends: of raw bytes the last code point is left out.
    std::size_t size_of(std::string_view form) const {
        std::size_t size = form.size();
        if (unit_ != Unit::raw) return size;
        while (size > 0 && (static_cast<unsigned char>(form[size - 1]) & 0xC0) == 0x80) --size;
        return size > 0 ? size - 1 : 0;
    }

    std::size_t count_, rows_, ngram_;
    Unit unit_;
    Hash hash_;
    std::uint64_t mask_;
    std::vector<std::uint64_t> a_, b_;
};

}  // namespace mdata::minhash
