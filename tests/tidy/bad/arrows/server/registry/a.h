// One half of a cycle.
#pragma once

#include "server/registry/b.h"
