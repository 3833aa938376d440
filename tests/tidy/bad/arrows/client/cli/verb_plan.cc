#include "server/registry/a.h"
#include "server/step/machine.h"
