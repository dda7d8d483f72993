// What every kernel file uses: sizes, bf16 conversion, errors, aligned memory. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))
#define VLLM_INLINE inline __attribute__((always_inline))

namespace vllm {

constexpr int kPartition = 256;  // attention works on fixed partitions of this many absolute positions
constexpr int kLanes = 16;       // fp32 numbers of one `F` (vec.h) in every variant
constexpr int kPanel = 32;       // output columns of one weight panel (gemm.h)

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Round to nearest even; a NaN stays a (quiet) NaN. The vector forms in vec.h give the same bits, but for denormals, which
// some instructions flush: there is one conversion per variant and every path uses it (vec.h, to_bf16).
inline uint16_t bf16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Checks of what callers hand in. `require` always runs; `check` only in debug and sanitized builds (it may cost a step time).
inline void require(bool ok, const char* message) {
  if (!ok) throw Error(message);
}
#ifdef VLLM_CHECKS
inline void check(bool ok, const char* message) { require(ok, message); }
#else
inline void check(bool, const char*) {}
#endif

// The text of the last error of this thread, for vllm_last_error(). C entry points return 0, or -1 with the text set:
//   return guarded([&] { ... });
std::string& last_error();

template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error() = error.what();
  } catch (...) {
    last_error() = "unknown error";
  }
  return -1;
}

// Zeroed memory that is touched lazily; large ones ask for huge pages. Not copied, moved only.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, bool huge = true);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  // At least `bytes` long afterwards; the content is lost when it has to grow.
  void reserve(size_t bytes);
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace vllm
