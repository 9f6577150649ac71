// mdata_cpp/minhash.hpp: n-grams that begin past 2^32 bytes. All else is compared with its twin by Python's tests.
#include "minhash.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "far_text.hpp"

using namespace mdata::minhash;

int main() {
    const std::vector<std::uint64_t> a{1}, b{0};
    const Signer signer(a, b, 1, 2, Unit::words, Hash::xxh64);
    constexpr std::uint64_t kFar = (std::uint64_t{1} << 32) + 1;
    const check::FarText text(kFar, "one two three");
    const std::vector<std::size_t> begins{kFar, kFar + 4, kFar + 8};
    std::vector<std::uint64_t> hashes;
    signer.ngram_hashes(text.view(), begins, hashes);
    CHECK((hashes == std::vector<std::uint64_t>{xxh64("one two"), xxh64("two three")}));
    // What finds the beginnings gives them to what hashes, so one type holds both.
    std::vector<std::size_t> found;
    std::string form;
    signer.normal_form(NormalForm(), "One, two - THREE", form, found);
    CHECK(form == "one two three" && (found == std::vector<std::size_t>{0, 4, 8}));
    return check::finish("minhash");
}
