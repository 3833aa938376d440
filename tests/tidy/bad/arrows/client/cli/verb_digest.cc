#include "server/registry/a.h"
