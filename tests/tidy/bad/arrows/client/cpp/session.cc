// Client and server never meet.
#include "server/daemon/embedded.h"
#include "server/step/machine.h"
