// GNUstep looks for the block runtime here; Debian's is elsewhere.
#include <Block.h>
