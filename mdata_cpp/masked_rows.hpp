// Rows of sentences as flat arrays, from which samples of BERT and T5 are built, many at once; checked before use.
//
// Row i has a number (which draws its sample), a target, and the sentences up to ends[i], whose tokens are contiguous.
// Arrays that do not fit each other are refused when they are combined, so that the views from `each` stay inside them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>

#include "masked_samples.hpp"

namespace mdata {

class MaskedRows {
public:
    MaskedRows(std::span<const std::int64_t> numbers, std::span<const std::int64_t> targets,
               std::span<const std::int64_t> ends, std::span<const std::int32_t> sizes,
               std::span<const std::int64_t> tokens)
        : numbers_(numbers), targets_(targets), ends_(ends), sizes_(sizes), tokens_(tokens) {
        if (targets_.size() != size() || ends_.size() != size()) throw std::invalid_argument("a target and an end for each row");
        std::int64_t before = 0;
        for (const std::int64_t end : ends_) {
            if (end < before) throw std::invalid_argument("ends of rows that decrease");
            before = end;
        }
        if (static_cast<std::uint64_t>(before) != sizes_.size()) throw std::invalid_argument("sizes beyond the last row");
        std::uint64_t tokens_of_all = 0;
        for (const std::int32_t one : sizes_) {
            if (one < 0) throw std::invalid_argument("a sentence of negative size");
            tokens_of_all += static_cast<std::uint64_t>(one);
        }
        if (tokens_of_all != tokens_.size()) throw std::invalid_argument("tokens that are not the sentences'");
    }

    std::size_t size() const { return numbers_.size(); }

    // visit(i, number, text) for each row, until one returns false; the row that did, or none.
    template <typename Visit>
    std::optional<std::size_t> each(Visit&& visit) const {
        std::size_t sentence = 0, token = 0;
        for (std::size_t i = 0; i < size(); ++i) {
            const auto sizes = sizes_.subspan(sentence, static_cast<std::size_t>(ends_[i]) - sentence);
            std::size_t count = 0;
            for (const std::int32_t one : sizes) count += static_cast<std::size_t>(one);
            if (!visit(i, numbers_[i], SampleText{sizes, tokens_.subspan(token, count), targets_[i]})) return i;
            sentence += sizes.size();
            token += count;
        }
        return std::nullopt;
    }

private:
    std::span<const std::int64_t> numbers_, targets_, ends_;
    std::span<const std::int32_t> sizes_;
    std::span<const std::int64_t> tokens_;
};

}  // namespace mdata
