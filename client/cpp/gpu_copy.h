// A program for GPUs that copies many pieces of memory in one launch. The client links no CUDA and
// is compiled without it, so the program comes as text, which the driver translates for whatever
// device there is; `ptxas` checks it where tests find one.
#pragma once

#include <cstddef>

namespace muond::client {

// What the program gets, by value: a launch has a grid of (blocks for each piece) x (pieces).
struct GpuCopies {
  static constexpr std::size_t kMost = 128;  // 3 KiB of the 4 that arguments may have
  struct Piece {
    unsigned long long to, from, bytes;  // addresses that the device reaches; multiples of 2
  };
  Piece pieces[kMost];
};

inline constexpr unsigned kGpuCopyThreads = 256;  // of a block
inline constexpr char kGpuCopyName[] = "copy_pieces";
// 16 bytes at a time where both addresses and the size are multiples of 16, else 2.
inline constexpr char kGpuCopyProgram[] = R"ptx(
.version 7.1
.target sm_60
.address_size 64

.visible .entry copy_pieces(.param .align 8 .b8 pieces[3072])
{
  .reg .pred  %narrow, %more;
  .reg .b16   %half;
  .reg .b32   %index, %threads, %x<4>;
  .reg .b64   %piece, %to, %from, %bytes, %all, %unit, %at, %stride, %source, %target;

  // This block's piece.
  mov.b64       %piece, pieces;
  mov.u32       %index, %ctaid.y;
  mad.wide.u32  %piece, %index, 24, %piece;
  ld.param.u64  %to, [%piece];
  ld.param.u64  %from, [%piece+8];
  ld.param.u64  %bytes, [%piece+16];
  cvta.to.global.u64 %target, %to;
  cvta.to.global.u64 %source, %from;

  or.b64        %all, %to, %from;
  or.b64        %all, %all, %bytes;
  and.b64       %all, %all, 15;
  setp.ne.u64   %narrow, %all, 0;
  selp.u64      %unit, 2, 16, %narrow;

  // Threads of all blocks of the piece walk side by side.
  mov.u32       %threads, %ntid.x;
  mov.u32       %index, %ctaid.x;
  mov.u32       %x0, %tid.x;
  mad.lo.u32    %index, %index, %threads, %x0;
  cvt.u64.u32   %at, %index;
  mul.lo.u64    %at, %at, %unit;
  mov.u32       %x1, %nctaid.x;
  mul.wide.u32  %stride, %threads, %x1;
  mul.lo.u64    %stride, %stride, %unit;
  add.u64       %source, %source, %at;
  add.u64       %target, %target, %at;
  @%narrow bra  NARROW;

WIDE:
  setp.lt.u64   %more, %at, %bytes;
  @!%more bra   DONE;
  ld.global.v4.u32 {%x0, %x1, %x2, %x3}, [%source];
  st.global.v4.u32 [%target], {%x0, %x1, %x2, %x3};
  add.u64       %source, %source, %stride;
  add.u64       %target, %target, %stride;
  add.u64       %at, %at, %stride;
  bra           WIDE;

NARROW:
  setp.lt.u64   %more, %at, %bytes;
  @!%more bra   DONE;
  ld.global.u16 %half, [%source];
  st.global.u16 [%target], %half;
  add.u64       %source, %source, %stride;
  add.u64       %target, %target, %stride;
  add.u64       %at, %at, %stride;
  bra           NARROW;

DONE:
  ret;
}
)ptx";

}  // namespace muond::client
