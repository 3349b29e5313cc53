"""How good a mask is: scores per lung, tables of them, and pictures to look at."""
