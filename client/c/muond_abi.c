/* The header compiles as C, in the library itself: everything else is C++. */
#include "client/c/muond.h"

_Static_assert(sizeof(muond_source) == 72, "muond_source is part of the ABI");
_Static_assert(sizeof(muond_sink) == 64, "muond_sink is part of the ABI");
