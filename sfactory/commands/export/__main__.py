"""``python -m sfactory.commands.export``."""

import sys

from sfactory.commands.export import main

sys.exit(main())
