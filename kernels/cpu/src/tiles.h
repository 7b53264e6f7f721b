// The eight AMX tile registers of a thread: 16 rows of 64 bytes at most, 32 bfloat16 or 16 float32 each.

#pragma once

#include "simd.h"

namespace {

#if defined(__AMX_BF16__)

constexpr int64_t kTileBytes = 64;  // of a row
constexpr int kTileWords = 256;     // of a tile, of four bytes

// Opens them until `tile_release`: `low` <= 16 rows in tiles 0, 1 and 4, `high` in 2, 3 and 5, if any; else 16.
inline void tile_configure(int low = 16, int high = 0) {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = kTileBytes, config.rows[i] = 16;
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(low);
  if (high) config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(high);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

inline void tile_release() { __asm__ volatile("tilerelease" ::); }

#else

inline void tile_configure() {}
inline void tile_release() {}

#endif  // __AMX_BF16__

}  // namespace
