"use strict";
// Ask for the next part; without this script the button does.
document.querySelector("form[data-workflows-continue]")?.requestSubmit();
