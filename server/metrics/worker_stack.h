// Room on the stacks of the HTTP server's threads.
//
// Civetweb gives its threads 100 KiB and has no option for more, and glibc takes a thread's static
// thread-local storage out of its stack: OpenBLAS alone has 60 KiB of that, the CUDA runtime comes
// on top. What was left was overrun at the first request.
#pragma once

namespace muond {

// Nothing happens when it is called: who links it has a pthread_attr_setstacksize that gives no
// thread less than 1 MiB.
void GiveThreadsRoom();

}  // namespace muond
