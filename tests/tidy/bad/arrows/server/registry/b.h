// The other half: the cycle is reported where it closes.
#pragma once

#include "server/registry/a.h"
