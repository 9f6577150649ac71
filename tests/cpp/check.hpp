// Checks for the C++ tests: CHECK and CHECK_THROWS count and report, finish() ends main with a line and a status.
#pragma once

#include <cstdio>

namespace check {

inline int passed = 0;
inline int failed = 0;

inline void report(bool ok, const char* text, const char* file, int line) {
    ok ? ++passed : ++failed;
    if (!ok) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
}

// 0 if every check held and there was one; else 1.
inline int finish(const char* name) {
    std::printf("%s: %d checks passed, %d failed\n", name, passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition) check::report(static_cast<bool>(condition), #condition, __FILE__, __LINE__)

#define CHECK_THROWS(Exception, statement)                                  \
    do {                                                                    \
        bool thrown = false;                                                \
        try {                                                               \
            (void)(statement);                                              \
        } catch (const Exception&) {                                        \
            thrown = true;                                                  \
        }                                                                   \
        check::report(thrown, #statement " throws " #Exception, __FILE__, __LINE__); \
    } while (false)
