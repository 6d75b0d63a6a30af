"""Other systems' interfaces over this one, so that scripts written for them run under any launcher here."""
