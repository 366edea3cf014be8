"""Every contract suite checks what its engines leave behind."""

from kits.contract import nothing_is_left as nothing_is_left
