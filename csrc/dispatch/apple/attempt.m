#import "dispatch/apple/attempt.h"

NSString* mlx_moe_attempt(void (^body)(void)) {
  @try {
    body();
  } @catch (NSException* exception) {
    return exception.reason ?: exception.name;
  }
  return nil;
}
