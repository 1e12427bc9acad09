"""Write the demo checkpoint into a directory of one's own choice: `python tools/make_demo.py OUT`.

`headrace demo` needs no such step: it makes the same files under the user's cache at first start.
"""

import sys
from pathlib import Path

from headrace.model.demo import write_demo


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_demo(folder)
    print(folder)


if __name__ == "__main__":
    main()
