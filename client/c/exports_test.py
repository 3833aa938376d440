"""libmuond_client.so exports the functions of muond.h at node MUOND_1, all of them, and nothing
else: a symbol more could meet another library's in a trainer's process."""

import pathlib
import re
import subprocess
import sys

header = (pathlib.Path(__file__).parent / "muond.h").read_text()
declared = set(re.findall(r"^(?:int32_t|uint32_t|void|const char\*) (muond_\w+)\(", header, re.M))
symbols = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", sys.argv[1]],
                         capture_output=True, text=True, check=True).stdout
exported = {line.split()[-1] for line in symbols.splitlines()} - {"MUOND_1"}
wanted = {f"{name}@@MUOND_1" for name in declared}
assert len(declared) > 20, declared
assert exported == wanted, (
    f"not exported: {sorted(wanted - exported)}; exported beside them: {sorted(exported - wanted)}")
print(f"{len(exported)} functions, all of muond.h")
