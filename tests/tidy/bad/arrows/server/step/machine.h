// The pure machine.
#pragma once
