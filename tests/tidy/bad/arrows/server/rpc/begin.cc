// Nor the other way round.
#include "client/cpp/session.h"
