// The known answers of Random123 (kat_vectors, "philox4x32 10").
#include "check.hpp"
#include "philox.hpp"

int main() {
    using mdata::Counter;
    using mdata::philox4x32;
    CHECK((philox4x32({0, 0, 0, 0}, {0, 0}) == Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    constexpr std::uint32_t ones = 0xffffffff;
    CHECK((philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
           Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    CHECK((philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
           Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
    return check::finish("philox");
}
