// Element types.
#pragma once
